"""Help pages for terminals of 80 columns, flags in error messages, and shell completion."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from dlm_bridge import terminal
from dlm_bridge.errors import ChangedTensorsError, CheckpointError, DlmBridgeError, SettingError
from dlm_bridge.settings import Option, kind_text, nearest, options_of

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")
NAMES_WIDTH = 36  # columns for an option's names and metavar; the longest name has 30
LAYOUT, LOADING = "Layout", "Loading"  # titles of panels that several commands share
# Base of all usage errors (a missing argument, an unknown option or command), which Typer does not export.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


_command: list[Any] = []  # the running command, if any


def message(error: DlmBridgeError) -> str:
    """Message of an error with flags of the running command for the settings that it names."""
    reason = in_flags(error.reason)
    if error.field is None:
        return reason
    is_path = isinstance(error, CheckpointError | ChangedTensorsError)  # a folder may be called "output"
    return f"{error.field if is_path else in_flags(f'`{error.field}`').strip('`')}: {reason}"


def in_flags(text: str) -> str:
    """Replace settings in backquotes by flags of the running command."""
    names = _flags_by_setting(_command[-1]) if _command else {}

    def flag(found: re.Match[str]) -> str:
        setting, value = found["setting"], found["value"]
        if setting not in names:
            return found[0]
        on, off = names[setting]
        if value is None or (off and value == "True"):
            return on
        return off if off and value == "False" else f"{on} {value}"

    return re.sub(r"`(?P<setting>\w+)(?:=(?P<value>[^`]+))?`", flag, text)


def _flags_by_setting(command: Any) -> dict[str, tuple[str, str]]:
    """(flag that sets it, flag that unsets it) by the setting's name in Python; for an argument its metavar."""
    found = {}
    for each in command.params:
        if each.param_type_name == "argument":
            found[each.name] = (each.metavar or each.name.upper(), "")
        else:
            on = next((name for name in each.opts if name.startswith("--")), each.opts[0])
            off = each.secondary_opts[0] if each.secondary_opts else ""
            found |= dict.fromkeys((each.name, on.lstrip("-").replace("-", "_")), (on, off))
    return found | ({"model": ("--model", "")} if isinstance(command, ModelCommand) else {})


class App(typer.Typer):
    """Typer app whose commands are `Command`s."""

    def command(self, *arguments: Any, **options: Any) -> Any:
        return super().command(*arguments, **{"cls": Command, **options})


class Command(TyperCommand):
    """Command with a help page of two columns, names and explanations, which wrap. (Typer's page has six columns and
    truncates.) The error for an unknown option names the nearest one, including those that only --help-all shows."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not self.ignore_unknown_options:  # a command that passes its words on
            self.params += _verbosity_options()

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        _command[:] = [self]
        return super().make_context(*arguments, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for option in self.params:
            if len(option.opts) > 1 and not (getattr(option, "multiple", False) or getattr(option, "is_flag", False)):
                given = dict(split_option(args, option.opts)[1])
                if len(set(given.values())) > 1:
                    (one, a), (other, b) = list(given.items())[:2]
                    raise SettingError(option.name, f"has two values, {one} {a} and {other} {b}: give one of them")
        try:
            return super().parse_args(ctx, [*args])  # which empties the list
        except UsageError as error:
            if error.ctx is None:  # type: ignore[attr-defined]
                error.ctx = ctx  # type: ignore[attr-defined]
            _refuse_text(getattr(error, "param", None), args, error.message)  # type: ignore[attr-defined]
            if type(error) is typer.BadParameter and error.param is not None:
                raise SettingError(str(error.param.name), error.message) from None
            if hasattr(error, "possibilities"):  # an unknown option
                answer = self.answer(error.option_name)  # type: ignore[attr-defined]
                error.possibilities = None
                error.message = f"No such option: {error.option_name}{answer and f': {answer}'}"  # type: ignore[attr-defined]
            raise

    def answer(self, word: str) -> str:
        """Hint at the option that an unknown one may mean, or an empty text."""
        return nearest(word, self.flags)

    @property
    def flags(self) -> list[str]:
        """All names of all options."""
        return [name for each in self.params for name in (*each.opts, *each.secondary_opts) if name.startswith("-")]

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete hidden options too, once a name has begun."""
        hidden: list[Any] = [each for each in self.params if getattr(each, "hidden", False) and incomplete[2:]]
        for option in hidden:
            option.hidden = False
        found = super().shell_complete(ctx, incomplete)
        for option in hidden:
            option.hidden = True
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.console import Console
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.text import Text

        console = Console(highlight=False)
        console.print(Padding(Text(self.get_usage(ctx), "bold"), 1))
        for paragraph in _paragraphs(self.help or "", console.width - 2):
            console.print(Padding(Text(paragraph), (0, 1, 1, 1)))
        for title, parameters in self._panels(ctx).items():
            console.print(Panel(parameter_table(parameters), title=title, title_align="left", border_style="dim"))

    def _panels(self, ctx: Any) -> dict[str, list[Any]]:
        """Parameters by the title of their panel."""
        panels: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if not getattr(parameter, "hidden", False) or ctx.meta.get(HELP_ALL):
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                title = getattr(parameter, "rich_help_panel", None) or usual
                panels.setdefault(title, []).append(parameter)
        return {title: found for title, found in panels.items() if found}


class ModelCommand(Command):
    """Command whose first argument is a model, which can also be given by --model."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        parameters: list[Any] = self.params
        self.model = next(each for each in parameters if each.param_type_name == "argument")
        self.model.help = f"{self.model.help.removesuffix('.')}; or --model."

    @property
    def flags(self) -> list[str]:
        return ["--model", *super().flags]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest, given = split_option(args, ("--model",))
        models = [value for _, value in given]
        if rest[-1:] == ["--model"] and not ctx.resilient_parsing:
            ctx.fail("Option '--model' requires an argument")
        if not models:
            return super().parse_args(ctx, args)
        refuse_two("model", models)
        try:
            return super().parse_args(ctx, [models[0], *rest])
        except UsageError as error:
            ctx.params.clear()
            try:  # one word too many: the argument is also given
                parsed = super().parse_args(ctx, rest)
            except UsageError:
                raise error from None
            refuse_two("model", [str(ctx.params[self.model.name]), *models])
            return parsed


def _refuse_text(option: Any, words: Sequence[str], reason: str) -> None:
    """Raise SettingError if `option` takes a number, its value in `words` is none, and `reason` does not contain the
    value, as newer versions of Typer do not."""
    kinds: dict[str, Callable[[str], float]] = {"INT": int, "FLOAT": float}
    number = kinds.get(_type_name(option)) if option is not None else None
    if number is None:
        return
    for _, text in split_option(words, option.opts)[1][-1:]:
        try:
            number(text)
        except ValueError:
            if text not in reason:
                raise SettingError(option.name, f"must be {kind_text(number)}, not {text!r}") from None


def split_option(words: Sequence[str], names: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split command-line words into those without an option and its values, and the option's (name, value) pairs."""
    rest, given, following = [], [], iter(words)
    for word in following:
        name, equals, value = word.partition("=")
        if name in names and (found := value if equals else next(following, None)) is not None:
            given.append((name, found))
        else:
            rest.append(word)
        if word == "--":
            rest += following
    return rest, given


def refuse_two(setting: str, values: Iterable[T]) -> T | None:
    """The only value, or None without any. Raises SettingError for two different ones."""
    found = list(dict.fromkeys(values))
    if len(found) > 1:
        raise SettingError(setting, f"has two values, {found[0]} and {found[1]}: give one of them")
    return found[0] if found else None


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[HELP_ALL] = True
        ctx.command.format_help(ctx, None)  # type: ignore[arg-type]
        raise typer.Exit


def _be_verbose(ctx: typer.Context, wanted: bool) -> None:
    _set_verbosity("verbose", wanted)


def _be_quiet(ctx: typer.Context, wanted: bool) -> None:
    _set_verbosity("quiet", wanted)


def _set_verbosity(verbosity: terminal.Verbosity, wanted: bool) -> None:
    if wanted:
        if terminal.verbosity() not in (None, "normal", verbosity):
            raise typer.BadParameter("-v and -q exclude each other")
        terminal.set_verbosity(verbosity)


@functools.cache
def _verbosity_options() -> list[Any]:
    """The parameters -v and -q of every command."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def command(
        verbose: Annotated[
            bool,
            typer.Option(
                *terminal.VERBOSE_FLAGS,
                callback=_be_verbose,
                help="Show log messages, also warnings of other packages.",
            ),
        ] = False,
        quiet: Annotated[
            bool, typer.Option("-q", "--quiet", callback=_be_quiet, help="Show errors and results only.")
        ] = False,
    ) -> None: ...

    found: list[Any] = [each for each in typer.main.get_command(app).params if each.name in ("verbose", "quiet")]
    for each in found:
        each.expose_value = False
    return found


HELP_ALL = "--help-all"
# Parameter of commands with hidden options.
HelpAll = Annotated[
    bool, typer.Option(HELP_ALL, callback=_show_all, is_eager=True, expose_value=False, help="Show every option.")
]


def parameter_table(parameters: list[Any]) -> Table:
    """Table of names and explanations, one row per parameter."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=NAMES_WIDTH, overflow="fold")
    table.add_column(overflow="fold")
    for parameter in parameters:
        shown = Text()
        if parameter.param_type_name == "argument":
            shown.append(parameter.metavar or parameter.name.upper(), "bold cyan")
        else:
            # The order of click's names of --help is undefined.
            names = sorted([*parameter.opts, *parameter.secondary_opts], key=lambda name: not name.startswith("--"))
            shown.append(names[0], "bold cyan")
            if kind := _kind_of_value(parameter):
                shown.append(f" {kind}", "yellow")
            for name in names[1:]:
                shown.append("\n" if name.startswith("--") else ", ").append(name, "bold cyan")
        text = Text(parameter.help or "")
        if parameter.required:
            text.append(" [required]", "red")
        elif default := _default(parameter):
            text.append(f" [default: {default}]", "dim")
        table.add_row(shown, text)
    return table


def _kind_of_value(option: Any) -> str | None:
    """Metavar of an option, in capitals; None for a switch."""
    if option.is_flag or option.secondary_opts:
        return None
    if option.metavar:
        return option.metavar
    return _type_name(option)


def _type_name(option: Any) -> str:
    described = getattr(option, "type_descriptor", None)  # newer versions of Typer; older ones have click's type
    kind = option.type.name if described is None else getattr(described.annotation, "__name__", "text")
    return {"integer": "INT", "str": "TEXT"}.get(kind, kind.upper())


def _default(parameter: Any) -> str | None:
    value = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    if not parameter.show_default or value is False or not isinstance(value, bool | int | float | str):
        return None
    return "on" if str(value) == "True" else str(value)


def _paragraphs(text: str, width: int) -> list[str]:
    """Paragraphs of a help text without the source's line breaks; commands of examples are broken with backslashes."""
    found = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        words = " ".join(paragraph.split())
        if words.startswith("Example: "):
            found.append(f"Example:\n\n{_command_line(words.removeprefix('Example: '), width)}")
        elif paragraph.startswith(" "):
            found.append(_command_line(words, width))
        else:
            found.append(words)
    return found


def _command_line(words: str, width: int) -> str:
    """Indent a command and break its lines with backslashes, but not within quotes or between an option and its
    value."""
    lines = [" "]
    for word in re.findall(r"--\S+ (?!-)(?:'[^']*'|\S)+|(?:'[^']*'|\S)+", words):
        if len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append("     ")
        lines[-1] += f" {word}"
    return "\n".join(lines)


def completes(values: Iterable[str] | Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completion of an option's value, for typer.Option(autocompletion=...)."""

    def found(incomplete: str) -> list[str]:
        known = values() if callable(values) else values
        return [value for value in known if value.startswith(incomplete)]

    return found


# Imported on use, because these modules would slow down the start of the command line.
def family_names() -> list[str]:
    from dlm_bridge.models.families import families

    return [spec.name for spec in families()]


def sampler_names() -> list[str]:
    from dlm_bridge.generation import SAMPLERS

    return list(SAMPLERS)


def objective_names() -> list[str]:
    from dlm_bridge.objectives.registry import objectives

    return list(objectives())


def cast_dtypes() -> list[str]:
    from dlm_bridge.mapping.dtypes import CAST_DTYPES

    return list(CAST_DTYPES)


# Completions of options without declared choices, by key.
COMPLETED = {
    "algorithm": sampler_names,
    "dtype": cast_dtypes,
    "family": family_names,
    "objective": objective_names,
}


def with_parameters(command: Callable[..., None], parameters: Mapping[str, tuple[Any, Any]]) -> Callable[..., None]:
    """Set the signature of a command, which Typer reads, to these parameters (name: annotation and default)."""
    command.__annotations__ = {name: annotation for name, (annotation, _) in parameters.items()}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in parameters.items()
        ]
    )
    return command


def declared_parameters(*classes: type, without: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Parameters for `with_parameters`: options of flat dataclasses, each class's own before inherited ones."""
    found: dict[str, tuple[Any, Any]] = {}
    for config_class in classes:
        options = options_of(config_class)
        for name in sorted(options, key=[*config_class.__annotations__, *options].index):
            if not options[name].section and name not in without:
                default = options[name].default
                found[name] = option_annotation(options[name]), ... if default is dataclasses.MISSING else default
    return found


def values_of(config_class: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a command's parameters that are options of the dataclass."""
    return {name: given[name] for name in options_of(config_class) if name in given}


def option_annotation(option: Option, help: str = "", task: str = "") -> Any:
    """Typer's annotation of a declared option, in the panel of its section, with the default of `task`."""
    help = help or option.help
    is_bool = bool in (option.type, *typing.get_args(option.type))
    names = [f"{option.flag}/{option.negative}"] if is_bool and option.negative else list(option.flags)
    default = option.default_for(task)
    shown = str(default) if isinstance(default, int | float | str) and default not in (False, "") else False
    if option.engine is not None:
        help = f"{help.removesuffix('.')} (--engine {option.engine})."
    section = option.section.capitalize() if option.section != "rl" else "Reinforcement learning"
    panel = option.panel or section or None
    known = COMPLETED.get(option.name, tuple(filter(None, option.choices)))
    more: dict[str, Any] = {"hidden": not option.common} | ({"autocompletion": completes(known)} if known else {})
    if option.metavar:
        more["metavar"] = option.metavar
    if option.refusals:
        more |= {"parser": _whole_number(option), "metavar": "INT"}
    return Annotated[
        option.type | None, typer.Option(*names, help=help, show_default=shown, rich_help_panel=panel, **more)
    ]


def _whole_number(option: Option) -> Callable[[str], int]:
    """Parser of a whole number, whose errors include the option's refusals."""

    def whole_number(text: str) -> int:
        if text in option.refusals:
            raise typer.BadParameter(f"{text!r}: {option.refusals[text]}")
        try:
            return int(text)
        except ValueError:
            raise typer.BadParameter(f"must be a whole number, not {text!r}") from None

    return whole_number


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub folder or id, or Megatron checkpoint.")]
