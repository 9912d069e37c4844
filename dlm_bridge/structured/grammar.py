"""Context-free grammars in Lark's notation, or in EBNF with `::=`, as regular languages of a limited depth.

    start: "[" (item ("," item)*)? "]"      // Lark: names, strings, /regular expressions/, groups, ? * + | and ~ 2..3
    item: /[0-9]+/ | start
    root ::= "[" [0-9]+ "]"                 # EBNF: character classes stand alone, the start rule is `root`

Rules that do not lead back to themselves are written exactly; recursive ones up to a depth.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from dlm_bridge.structured.languages import (
    NOTHING,
    Limits,
    Node,
    automaton_node,
    determinize,
    optional,
    repeat,
    sequence,
    text,
    union,
)
from dlm_bridge.structured.regex import RegexError, parse_regex

_COMMON = r"""(?P<space>[ \t\r\n]+|//[^\n]*|\#[^\n]*)
    |(?P<name>(?:(?m:^)[?!])?_?[A-Za-z][A-Za-z0-9_-]*(?P<define>[ \t]*(?:::=|:))?)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?|'(?:[^'\\\n]|\\.)*')
    |(?P<arrow>->[ \t]*\w+)
    |(?P<directive>%[^\n]*)
    |(?P<symbol>[()|?*+])"""
_LARK = re.compile(
    _COMMON
    + r"""|(?P<regex>/(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/)
    |(?P<count>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)
    |(?P<bracket>[\[\]])""",
    re.VERBOSE,
)
_EBNF = re.compile(
    _COMMON + r"""|(?P<characters>\[(?:[^\]\\\n]|\\.)*\]|\.)|(?P<count>\{\d+(?:,\d*)?\})""",
    re.VERBOSE,
)
_MAX_GROUPS = 100


class GrammarError(ValueError):
    """A grammar is invalid or not supported; the message names the line."""


@dataclass
class _Token:
    kind: str
    text: str
    line: int


def parse_grammar(grammar: str, limits: Limits, depth: int) -> Node:
    """Syntax tree of the texts of a grammar.

    The start rule is `start`, else `root`, else the first one. Refused: directives (`%ignore`, `%import`), templates,
    priorities, and regular expressions that are not regular.

    Args:
        depth: recursive rules that lie in each other. A text that needs more does not belong to the language.

    Raises GrammarError.
    """
    tokens = _tokens(grammar)
    rules: dict[str, list[_Token]] = {}
    current: list[_Token] | None = None
    for token in tokens:
        if token.kind == "define":
            if token.text in rules:
                raise GrammarError(f"line {token.line}: the rule {token.text!r} is defined twice")
            current = rules[token.text] = []
        elif current is None:
            raise GrammarError(f"line {token.line}: a rule must begin with its name and a colon or ::=")
        else:
            current.append(token)
    if not rules:
        raise GrammarError("it has no rules")
    start = next((name for name in ("start", "root") if name in rules), next(iter(rules)))
    return _Builder(rules, limits, depth).rule(start, 0, 1)


def _tokens(grammar: str) -> list[_Token]:
    found: list[_Token] = []
    position, line = 0, 1
    notation = _EBNF if re.search(r"(?m)^\s*[\w-]+\s*::=", grammar) else _LARK
    while position < len(grammar):
        match = notation.match(grammar, position)
        if match is None:
            raise GrammarError(f"line {line}: unexpected {grammar[position : position + 10]!r}")
        kind = match.lastgroup if match["define"] is None else "define"
        value = match[0]
        if kind == "directive":
            raise GrammarError(f"line {line}: directives such as {value.split()[0]} are not supported")
        if kind in ("define", "name"):
            value = re.split(r"[ \t:]", value)[0].lstrip("?!")
        if kind not in ("space", "arrow"):
            found.append(_Token("symbol" if kind == "bracket" else str(kind), value, line))
        line += match[0].count("\n")
        position = match.end()
    return found


@dataclass
class _Builder:
    rules: dict[str, list[_Token]]
    limits: Limits
    depth: int
    _nodes: dict[tuple[str, int], Node] = field(default_factory=dict)
    _recursive: dict[str, bool] = field(default_factory=dict)

    def rule(self, name: str, level: int, line: int) -> Node:
        """Syntax tree of a rule inside of `level` recursive rules."""
        if name not in self.rules:
            raise GrammarError(f"line {line}: the rule {name!r} is not defined")
        self.limits.check_time()
        if self._is_recursive(name):
            level += 1
            if level > self.depth:
                return NOTHING
        key = (name, level)
        if key not in self._nodes:
            loop = self._loop(name, level)
            if loop is None:
                parser = _Parser(self.rules[name], self, level)
                loop = parser.union(0)
                if parser.position < len(parser.tokens):
                    token = parser.tokens[parser.position]
                    raise GrammarError(f"line {token.line}: unexpected {token.text!r}")
            self._nodes[key] = loop
        return self._nodes[key]

    def _loop(self, name: str, level: int) -> Node | None:
        """Rules that are recursive only at one end of their alternatives, such as `list: list "," item | item`, are
        repetitions, and have no limit of depth. None: not such a rule."""
        alternatives = _split(self.rules[name])
        own = [[token.kind == "name" and token.text == name for token in each] for each in alternatives]
        if not any(map(any, own)):
            return None
        for left in (True, False):
            ends = [flags[:1] if left else flags[-1:] for flags in own]
            others = [flags[1:] if left else flags[:-1] for flags in own]
            if any(map(any, others)):
                continue
            first: list[Node] = []
            steps: list[Node] = []
            for tokens, end in zip(alternatives, ends, strict=True):
                recursive = any(end)
                rest = (tokens[1:] if left else tokens[:-1]) if recursive else tokens
                if recursive and left and rest and (rest[0].kind == "count" or rest[0].text in ("?", "*", "+")):
                    return None  # a repetition of the rule itself
                node = _Parser(rest, self, level).whole()
                (steps if recursive else first).append(node)
            base, step = union(*first), repeat(union(*steps))
            return sequence(base, step) if left else sequence(step, base)
        return None

    def _is_recursive(self, name: str) -> bool:
        if name not in self._recursive:
            self._recursive[name] = self._leads_to(name, name)
        return self._recursive[name]

    def _leads_to(self, source: str, target: str) -> bool:
        seen, waiting = set(), [source]
        while waiting:
            for token in self.rules.get(waiting.pop(), ()):
                if token.kind == "name" and token.text not in seen:
                    seen.add(token.text)
                    waiting.append(token.text)
        return target in seen


def _split(tokens: list[_Token]) -> list[list[_Token]]:
    """Alternatives of a rule."""
    found: list[list[_Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "symbol" and token.text in "([":
            depth += 1
        elif token.kind == "symbol" and token.text in ")]":
            depth -= 1
        if token.kind == "symbol" and token.text == "|" and depth == 0:
            found.append([])
        else:
            found[-1].append(token)
    return found


@dataclass
class _Parser:
    tokens: list[_Token]
    builder: _Builder
    level: int
    position: int = 0

    def whole(self) -> Node:
        node = self.union(0)
        if self.position < len(self.tokens):
            raise GrammarError(
                f"line {self.tokens[self.position].line}: unexpected {self.tokens[self.position].text!r}"
            )
        return node

    def union(self, groups: int) -> Node:
        if groups > _MAX_GROUPS:
            raise GrammarError(f"groups are nested deeper than {_MAX_GROUPS}")
        parts = [self._sequence(groups)]
        while self._symbol("|"):
            parts.append(self._sequence(groups))
        return union(*parts)

    def _sequence(self, groups: int) -> Node:
        parts = []
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token.kind == "symbol" and token.text in "|)]":
                break
            parts.append(self._quantified(groups))
        return sequence(*parts)

    def _quantified(self, groups: int) -> Node:
        node = self._atom(groups)
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token.kind == "count":
                self.position += 1
                numbers = [int(each) for each in re.findall(r"\d+", token.text)]
                most: int | None = numbers[-1]
                if token.text.endswith(",}"):
                    most = None
                if most is not None and most < numbers[0]:
                    raise GrammarError(f"line {token.line}: {token.text} has no number of repetitions")
                node = repeat(node, numbers[0], most)
            elif self._symbol("?"):
                node = optional(node)
            elif self._symbol("*"):
                node = repeat(node)
            elif self._symbol("+"):
                node = repeat(node, 1)
            else:
                break
        return node

    def _atom(self, groups: int) -> Node:
        token = self.tokens[self.position]
        self.position += 1
        if token.kind == "name":
            return self.builder.rule(token.text, self.level, token.line)
        if token.kind == "string":
            return self._string(token)
        if token.kind == "regex":
            return self._regex(token, token.text[1:-1])
        if token.kind == "characters":
            return self._regex(token, token.text)
        if token.kind == "symbol" and token.text in "([":
            node = self.union(groups + 1)
            if not self._symbol(")" if token.text == "(" else "]"):
                raise GrammarError(f"line {token.line}: a group is not closed")
            return node if token.text == "(" else optional(node)
        raise GrammarError(f"line {token.line}: unexpected {token.text!r}")

    def _string(self, token: _Token) -> Node:
        ignore_case, value = token.text.endswith("i"), token.text.removesuffix("i")
        if value[0] == "'":
            value = '"' + value[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
        value = re.sub(r"\\x([0-9A-Fa-f]{2})", r"\\u00\1", value)
        try:
            value = json.loads(value, strict=False)
            value.encode()
        except ValueError as error:
            raise GrammarError(f"line {token.line}: {token.text} is not a valid string: {error}") from error
        if not ignore_case:
            return text(value)
        return sequence(*(union(text(each.lower()), text(each.upper())) for each in value))

    def _regex(self, token: _Token, pattern: str) -> Node:
        try:
            node = parse_regex(pattern.replace("\\/", "/"))
        except RegexError as error:
            raise GrammarError(f"line {token.line}: {token.text} is invalid {error}") from error
        return automaton_node(determinize(node, self.builder.limits)) if "^" in pattern or "$" in pattern else node

    def _symbol(self, symbol: str) -> bool:
        if self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token.kind == "symbol" and token.text == symbol:
                self.position += 1
                return True
        return False
