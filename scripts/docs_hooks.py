"""Pages that MkDocs generates: the command line from Typer, the configuration from its declaration, the families from
their specs and cards, and pages that lie elsewhere in the repository."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
CARDS = "model_cards"
# Pages of the repository that are shown as they are, by their place in the site.
SHOWN = {"configs/README.md": "recipes.md", "CONTRIBUTING.md": "contributing.md"}
WIDTH = 88  # of code: what a window of 1,280 pixels shows beside the navigation
SHELL = re.compile(r"^```(?:bash)?\n.*?^```$", re.M | re.S)
COMMAND = re.compile(r"(?:dlm-bridge|torchrun|python3?|make|lmdeploy|bash|[A-Z_]+=\S+) ")
HYPHENATED = re.compile(r"(?<![\w/-])-{0,2}[\w]+(?:-\w+)+|-{1,2}\w+")
# A word of a shell command, with the blanks before it.
WORD = re.compile(r"""\s*(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the cards below the families' page in the navigation, and the repository's address into the header."""
    config.repo_url = repository((ROOT / "pyproject.toml").read_text())
    assert config.nav is not None
    (section,) = (entry for entry in config.nav if "Families" in entry)
    section["Families"] = [section["Families"], *(f"families/{card.name}" for card in cards())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/cli.md": command_line(),
        "reference/configuration.md": configuration(),
        "families/index.md": families(),
    }
    readme = (ROOT / "README.md").read_text()
    pages["coming_from.md"] = relinked(section(readme, "Coming from other tools"))
    for source, place in SHOWN.items():
        pages[place] = relinked((ROOT / source).read_text())
    for card in cards():
        pages[f"families/{card.name}"] = relinked(card.read_text(), up="../")
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links from pages of docs/ to pages that lie elsewhere in the repository, as they are in the site; and wrapped
    commands."""
    markdown = re.sub(rf"\]\(\.\./{CARDS}/([\w.#-]+)\)", r"](families/\1)", markdown)
    for source, place in SHOWN.items():
        markdown = markdown.replace(f"](../{source}", f"]({place}")
    markdown = markdown.replace("](../README.md#coming-from-other-tools)", "](coming_from.md)")
    return SHELL.sub(lambda block: wrapped(block[0]), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Code in tables without the backslash that keeps a bar from ending its cell, and names of options that are not
    broken at their hyphens."""
    html = re.sub(r"<t[dh]\b.*?</t[dh]>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.S)
    return re.sub(
        r"<code>[^<]*</code>", lambda code: HYPHENATED.sub(r'<span class="whole">\g<0></span>', code[0]), html
    )


def repository(pyproject: str) -> str | None:
    """The address in [project.urls], if it has one."""
    return tomllib.loads(pyproject)["project"].get("urls", {}).get("Repository")


def section(text: str, heading: str) -> str:
    """The section of a page, with its heading as a title."""
    (found,) = re.findall(rf"^#(# {heading}\n.*?)(?=^## |\Z)", text, re.M | re.S)
    return found


def wrapped(block: str) -> str:
    """A block with its commands in lines of at most `WIDTH` characters, a comment behind a long one in front of it."""
    lines: list[str] = []
    command: list[str] = []
    for line in block.splitlines():
        command.append(line)
        if line.endswith("\\"):
            continue
        if max(map(len, command)) > WIDTH and COMMAND.match(command[0]):
            command = wrapped_command(" ".join(part.removesuffix("\\").strip() for part in command))
        lines += command
        command = []
    return "\n".join(lines + command)


def wrapped_command(command: str) -> list[str]:
    """A command, continued in front of options where that is enough."""
    try:
        shlex.split(command, comments=True)
    except ValueError:  # a text that goes on in the next line
        return [command]
    lines = []
    if found := re.fullmatch(r"""((?:'[^']*'|"[^"]*"|[^#'"])*\S)\s+(# .*)""", command):
        command = found[1]
        lines.append(found[2])
    parts: list[str] = []
    for word in WORD.findall(command):
        value = parts and parts[-1].lstrip().startswith("--") and not word.lstrip().startswith(("-", "|", "&"))
        if value and len(parts[-1] + word) < WIDTH - 8:
            parts[-1] += word
        else:
            parts.append(word)
    line = ""
    for part in parts:
        if line and len(line + part) + 2 > WIDTH:
            lines.append(f"{line} \\")
            line = f"    {part.lstrip()}"
        else:
            line += part
    return [*lines, line]


def cards() -> list[Path]:
    return sorted((ROOT / CARDS).glob("*.md"))


def relinked(text: str, up: str = "") -> str:
    """Links to pages of docs/, as they are from the site's root; links to other files of the repository are code."""
    text = re.sub(r"\]\((?:\.\./)?docs/([\w/.#-]+)\)", rf"]({up}\1)", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#|[\w/.-]+\.(?:md|png|svg))([^)]+)\)", r"\1 (`\2`)", text)


def command_line() -> str:
    """A section for each command, with its arguments and options, in the order of the README and the page of tasks."""
    from dlm_bridge.cli.app import app

    root: Any = typer.main.get_command(app)
    tasks = (ROOT / "README.md").read_text() + (ROOT / "docs" / "tasks.md").read_text()
    named = list(dict.fromkeys(re.findall(r"(?<=dlm-bridge )[a-z][a-z-]+", tasks)))
    found = sorted(commands(root, ""), key=lambda one: (*named, one[0].split()[0]).index(one[0].split()[0]))
    contents = ["| command | |", "|---|---|"]
    for path, command in found:
        sentence = re.split(r"\.\s", f"{command.help} ")[0]
        contents.append(f"| [`{path}`](#{path.replace(' ', '-')}) | {escaped(sentence)} |".replace("\n", " "))
    parts = [
        "# Command line",
        "Exit codes: 0 success, 1 a check failed, 2 usage or input error, 130 interrupted. "
        "Several processes of one machine: `--nproc-per-node N`. Several nodes: [torchrun, Slurm](../launch.md).",
        "Every command has `-h` (`--help`), `-v` (`--verbose`: log messages, and warnings of other packages, which "
        "are hidden otherwise) and `-q` (`--quiet`: errors and results only).",
    ]
    parts.append("\n".join(contents))
    for path, command in found:
        parts += [f"## dlm-bridge {path} {{ #{path.replace(' ', '-')} }}", *described(command)]
    return "\n\n".join(parts) + "\n"


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The commands below `command`, with their words."""
    for name, known in sorted(getattr(command, "commands", {}).items()):
        if hasattr(known, "commands"):
            yield from commands(known, f"{path}{name} ")
        else:
            yield f"{path}{name}", known


def described(command: Any) -> Iterator[str]:
    """The help text, with its examples as code, and a table of parameters."""
    for paragraph in (command.help or "").strip().split("\n\n"):
        lines = paragraph.splitlines()
        if all(line.startswith("  ") for line in lines):
            yield "```bash\n" + "\n".join(line.strip() for line in lines) + "\n```"
        elif match := re.match(r"Example: (.*)", " ".join(line.strip() for line in lines)):
            yield f"```bash\n{match[1]}\n```"
        else:
            yield escaped(paragraph)
    rows = ["| option | | default |", "|---|---|---|"]
    for parameter in command.params:
        if parameter.name in ("help", "verbose", "quiet"):
            continue  # of every command
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            names = f"`{parameter.metavar or parameter.name.upper()}`".replace("|", "\\|")
        default = parameter.default
        shown = "" if default in (None, False, [], (), "") or callable(default) else f"`{default}`"
        rows.append(f"| {names} | {escaped(parameter.help or '')} | {shown} |".replace("\n", " "))
    yield "\n".join(rows)


def configuration() -> str:
    """A table for each section of the training configuration."""
    from dlm_bridge.settings import TASKS, options_of
    from dlm_bridge.train.config import RLConfig

    parts = [
        "# Configuration",
        "Options of `pretrain`, `sft` and `rl`: each has a flag, and a key in the YAML file that `--config` takes, "
        "nested in sections as here. Flags win over the file, and `DIR/config.yaml` is what a run resolved. Unknown "
        "keys are refused with the nearest name. On the command line `SECTION.KEY=VALUE` sets a key as well. A flag's "
        "further names are aliases, which are keys with underscores: `optimizer: {learning_rate: 1e-4}`. Options in "
        "bold are common: `--help` shows these, `--help-all` every one.",
    ]
    section = ""
    for option in options_of(RLConfig).values():
        if option.section != section:
            section = option.section
            parts.append(f"\n## {section}\n\n| key | flag | | default | allowed |\n|---|---|---|---|---|")
        default = "" if option.default in (None, [], "", False) else f"`{option.default}`"
        limits = [f"engine `{option.engine}`"] if option.engine else []
        limits += [", ".join(f"`{choice}`" for choice in option.choices if choice)] if option.choices else []
        limits += [f"at least {option.minimum:g}"] if option.minimum is not None else []
        limits += [f"above {option.above:g}"] if option.above is not None else []
        limits += [f"at most {option.maximum:g}"] if option.maximum is not None else []
        limits += [f"below {option.below:g}"] if option.below is not None else []
        if option.needs:
            other, needed = option.needs
            limits.append(f"with `{other}{'' if needed is None else f'={needed}'}`")
        limits += [f"`{'`, `'.join(option.tasks)}` only"] if option.tasks != TASKS else []
        limits += ["`rl` only"] if option.section == "rl" else []
        limited = escaped("; ".join(limits))
        name = f"**`{option.name}`**" if option.common else f"`{option.name}`"
        flags = ", ".join(f"`{flag}`" for flag in option.flags)
        parts[-1] += f"\n| {name} | {flags} | {escaped(option.help)} | {default} | {limited} |"
    return "\n\n".join(parts) + "\n"


def families() -> str:
    """The table of supported families, and what is known not to be supported."""
    from dlm_bridge.models import families as registry

    names = {card.stem for card in cards()}
    rows = ["| family | Hub `architectures` | attention | sampler | checked against |", "|---|---|---|---|---|"]
    for spec in registry.families():
        if spec.derived_from:  # their card has them all
            continue
        card = "autoregressive" if spec.kind == "autoregressive" else spec.name
        card = card if card in names else next((known for known in names if spec.name.startswith(known)), "")
        name = f"[{spec.title}]({card}.md)" if card else spec.title
        attention = spec.attention_pattern.replace("_", "-") + (
            ", shifted" if spec.shift and spec.kind == "diffusion" else ""
        )
        sampler = spec.sampler.get("algorithm", "transformers")
        architectures = ", ".join(f"`{name}`" for name in spec.architectures) or f"(`--family {spec.name}`)"
        rows.append(f"| {name} | {architectures} | {attention} | {sampler} | {spec.checked_against} |")
    unsupported = ["| architecture | why not |", "|---|---|"]
    unsupported += [f"| `{name}` | {reason} |" for name, reason in registry.UNSUPPORTED.items()]
    published = [spec for spec in registry.families() if not spec.derived_from]
    accelerate_only = " and ".join(
        spec.title for spec in published if "megatron" not in spec.training and not spec.mapping.hub_only
    )
    return "\n\n".join(
        [
            "# Families",
            "Every family loads through the Auto classes unless its card says otherwise, and trains with the "
            "Accelerate engine. All but those marked 'Hub side only' convert to Megatron's layouts, and all of these "
            f"but {accelerate_only} train with the Megatron engine. The cards say what was compared with what, shapes "
            "and the largest differences.",
            "\n".join(rows),
            "## Known, not supported",
            "\n".join(unsupported),
        ]
    )


def escaped(text: str) -> str:
    """Text in a table or paragraph: no markup of Typer's, no columns, no tags."""
    return re.sub(r"\[/?\w*\]", "", text).replace("|", "\\|").replace("<", "&lt;")
