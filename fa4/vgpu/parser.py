"""Tokens to a syntax tree (PTX ISA 4 and 11). ``parse(str(parse(text))) == parse(text)``."""

from __future__ import annotations

from fa4.vgpu.errors import PtxSyntaxError
from fa4.vgpu.lexer import Token, integer, tokenize
from fa4.vgpu.syntax import (
    Declaration,
    Directive,
    Function,
    Group,
    Guard,
    Instruction,
    Label,
    Location,
    Memory,
    Module,
    Name,
    Not,
    Number,
    Operand,
    Pair,
    Scope,
    Statement,
    Vector,
)

_SPACES = (".reg", ".shared", ".global", ".const", ".local", ".param", ".sreg")
_LINKAGE = (".extern", ".visible", ".weak", ".common")
_END = Token("end", "", 0)


def parse(text: str) -> Module:
    """The syntax tree of a PTX module.

    Raises:
        PtxSyntaxError: the text is not PTX, or uses syntax that is not known here.
    """
    return _Parser(tokenize(text)).module()


class _Parser:
    """Recursive descent with one token of lookahead."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = [*tokens, _END, _END]  # so that what follows the last one can be asked for
        self.at = 0
        self.names: dict[str, Name] = {}  # most are written more than once

    def peek(self, ahead: int = 0) -> Token:
        return self.tokens[self.at + ahead]

    def next(self) -> Token:
        token = self.tokens[self.at]
        self.at += token is not _END
        return token

    def accept(self, *texts: str) -> str:
        token = self.tokens[self.at]
        if token.text in texts and token.kind != "string":
            self.at += 1
            return token.text
        return ""

    def expect(self, text: str) -> Token:
        token = self.next()
        if token.text != text:
            raise self.error(f"expected {text!r}, found {token.text!r}", token)
        return token

    def word(self) -> str:
        token = self.next()
        if token.kind != "word":
            raise self.error(f"expected a name, found {token.text!r}", token)
        return token.text

    def number(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token.kind != "number":
            raise self.error(f"expected a number, found {token.text!r}", token)
        return sign * integer(token.text)

    def error(self, message: str, token: Token | None = None) -> PtxSyntaxError:
        return PtxSyntaxError(f"PTX line {(token or self.peek()).line}: {message}")

    def rest_of_line(self, line: int) -> list[Token]:
        """Directives without a semicolon end with their line."""
        start = self.at
        while self.peek().kind != "end" and self.peek().line == line:
            self.at += 1
        return self.tokens[start : self.at]

    # Modules

    def module(self) -> Module:
        version, target, size = "", ["sm_80"], 64
        variables: list[Declaration] = []
        functions: list[Function] = []
        files: list[tuple[int, str]] = []
        while self.peek().kind != "end":
            token = self.peek()
            if token.text == ".version":
                version = "".join(t.text for t in self.rest_of_line(token.line)[1:])
            elif token.text == ".target":
                target = [t.text for t in self.rest_of_line(token.line)[1:] if t.text != ","]
            elif token.text == ".address_size":
                self.next()
                size = self.number()
            elif token.text == ".file":
                words = self.rest_of_line(token.line)
                files.append((integer(words[1].text), words[2].text.strip('"')))
            elif token.text == ".section":
                self.skip_section()
            elif token.text in (".pragma", ".loc"):
                self.rest_of_line(token.line)
            else:
                linkage = self.accept(*_LINKAGE)
                if self.peek().text in (".entry", ".func"):
                    functions.append(self.function(linkage))
                else:
                    variables += self.declarations(linkage)
        return Module(version, tuple(target), size, tuple(variables), tuple(functions), tuple(files))

    def skip_section(self) -> None:
        while self.next().text != "}":
            if self.peek().kind == "end":
                raise self.error("a section does not end")

    def function(self, linkage: str) -> Function:
        kind = self.next().text
        results = self.parameters() if self.peek().text == "(" else ()
        name = self.word()
        parameters = self.parameters() if self.peek().text == "(" else ()
        limits = []
        while self.peek().kind == "directive":
            directive = self.next().text
            numbers = []
            while self.peek().kind == "number":
                numbers.append(self.number())
                self.accept(",")
            limits.append((directive, tuple(numbers)))
        body = None if self.accept(";") else self.scope()
        return Function(kind, name, parameters, results, tuple(limits), body, linkage)

    def parameters(self) -> tuple[Declaration, ...]:
        self.expect("(")
        found: list[Declaration] = []
        while not self.accept(")"):
            found.append(self.declaration_head(""))
            self.accept(",")
        return tuple(found)

    # Declarations

    def declarations(self, linkage: str) -> list[Declaration]:
        """``.reg .b32 %a, %b<4>;`` is two declarations."""
        first = self.declaration_head(linkage)
        found = [first]
        while self.accept(","):
            found.append(self.declared_name(first))
        self.expect(";")
        return found

    def declaration_head(self, linkage: str) -> Declaration:
        space = self.next()
        if space.text not in _SPACES:
            raise self.error(f"unknown directive {space.text!r}", space)
        align, vector, type_ = None, 1, ""
        pointer: list[str] = []
        while self.peek().kind == "directive":
            text = self.next().text
            if text == ".align" and not pointer:
                align = self.number()
            elif text in (".v2", ".v4"):
                vector = int(text[2:])
            elif text == ".ptr":
                pointer.append(text)
            elif pointer:  # .ptr .global .align 16: a promise about the value, which changes nothing here
                pointer.append(f".align {self.number()}" if text == ".align" else text)
            else:
                type_ = text
        template = Declaration(space.text, type_, "", align, vector, linkage=linkage, pointer=" ".join(pointer), line=space.line)
        return self.declared_name(template)

    def declared_name(self, like: Declaration) -> Declaration:
        name, count, dims, init = self.word(), None, [], None
        if self.accept("<"):
            count = self.number()
            self.expect(">")
        while self.accept("["):
            dims.append(None if self.peek().text == "]" else self.number())
            self.expect("]")
        if self.accept("="):
            init = tuple(self.initializer())
        return Declaration(
            like.space, like.type, name, like.align, like.vector, count, tuple(dims), init, like.linkage, like.pointer, like.line
        )

    def initializer(self) -> list[str]:
        if not self.accept("{"):
            return [self.literal()]
        items: list[str] = []
        while not self.accept("}"):
            items += self.initializer() if self.peek().text == "{" else [self.literal()]
            self.accept(",")
        return items

    def literal(self) -> str:
        sign = self.accept("-")
        token = self.next()
        if token.kind != "number":
            raise self.error(f"an initializer that is not a number: {token.text!r}", token)
        return sign + token.text

    # Statements

    def scope(self) -> Scope:
        self.expect("{")
        statements: list[Statement] = []
        while not self.accept("}"):
            if self.peek().kind == "end":
                raise self.error("a body does not end", self.tokens[self.at - 1])
            statements += self.statement()
        return Scope(tuple(statements))

    def statement(self) -> list[Statement]:
        token = self.peek()
        if token.text == "{":
            return [self.scope()]
        if token.text == ".loc":
            return [self.location()]
        if token.text in _SPACES:
            return list(self.declarations(""))
        if token.kind == "directive":
            self.next()
            words = []
            while self.peek().text != ";":
                words.append(self.next().text)
                self.accept(",")
                if self.peek().kind == "end":
                    raise self.error("a directive does not end", token)
            self.next()
            return [Directive(token.text, tuple(words), token.line)]
        if token.kind == "word" and self.peek(1).text == ":":
            self.at += 2
            if self.peek().kind == "directive" and self.peek().text in (".branchtargets", ".callprototype", ".calltargets"):
                (directive,) = self.statement()
                assert isinstance(directive, Directive)
                return [Directive(f"{token.text}: {directive.name}", directive.words, token.line)]
            return [Label(token.text, token.line)]
        return [self.instruction()]

    def location(self) -> Location:
        words = [t.text for t in self.rest_of_line(self.peek().line)[1:]]
        function, inlined = "", None
        if "function_name" in words:
            at = words.index("function_name") + 1
            function = "".join(words[at : at + 3 if at + 1 < len(words) and words[at + 1] == "+" else at + 1])
        if "inlined_at" in words:
            at = words.index("inlined_at") + 1
            inlined = (int(words[at]), int(words[at + 1]), int(words[at + 2]))
        return Location(int(words[0]), int(words[1]), int(words[2]), function, inlined)

    def instruction(self) -> Instruction:
        line, guard = self.peek().line, None
        if self.accept("@"):
            negated = bool(self.accept("!"))
            guard = Guard(self.word(), negated)
        opcode = self.word()
        operands: list[Operand] = []
        while not self.accept(";"):
            operands.append(self.operand())
            if self.peek().text != ";":
                self.expect(",")
        return Instruction(opcode, tuple(operands), guard, line)

    def operand(self) -> Operand:
        if self.accept("!"):
            return Not(self.operand())
        first = self.primary()
        return Pair(first, self.primary()) if self.accept("|") else first

    def primary(self) -> Operand:
        token = self.tokens[self.at]
        if token.kind == "word":
            return self.name()
        if token.text == "{":
            return Vector(self.items("{", "}"))
        if token.text == "(":
            return Group(self.items("(", ")"))
        if token.text == "[":
            return self.memory()
        if token.text in ("-", "~", "+") or token.kind == "number":
            sign = self.accept("-", "~", "+")
            if self.peek().kind != "number":
                raise self.error(f"expected a number, found {self.peek().text!r}")
            return Number(("" if sign == "+" else sign) + self.next().text)
        return self.name()

    def name(self) -> Name:
        text, offset = self.word(), self.offset()
        if offset:
            return Name(text, offset)
        if text not in self.names:
            self.names[text] = Name(text)
        return self.names[text]

    def items(self, opening: str, closing: str) -> tuple[Operand, ...]:
        self.expect(opening)
        found: list[Operand] = []
        while not self.accept(closing):
            found.append(self.operand())
            if self.peek().text != closing:
                self.expect(",")
        return tuple(found)

    def offset(self) -> int:
        total = 0
        while sign := self.accept("+", "-"):
            total += self.number() * (-1 if sign == "-" else 1)
        return total

    def memory(self) -> Memory:
        self.expect("[")
        base = self.primary()
        offset = self.offset()
        if isinstance(base, Name):
            base, offset = Name(base.text), offset + base.offset
        extra = []
        while self.accept(","):
            extra.append(self.operand())
        self.expect("]")
        return Memory(base, offset, tuple(extra))
