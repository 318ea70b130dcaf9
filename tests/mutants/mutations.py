"""The mutations of a file: small changes of its text that a test should notice."""

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
FUNCTIONS = {"any": "all", "all": "any", "min": "max", "max": "min", "sorted": "list"}
REDUCTIONS = {"SUM": "MAX", "MEAN": "SUM", "AVG": "SUM", "MAX": "MIN", "MIN": "MAX"}
# What these hold is read by people. The tests check such text only where a remedy depends on it.
TEXTS = {"request", "problem", "expected", "suggestion", "message", "hint", "note", "reason"}
CALLS_OF_TEXT = {"warn", "print", "add_note", "warning", "info", "debug", "cast", "TypeVar"}


@dataclass(frozen=True)
class Mutation:
    """A change of a file.

    Attributes:
        file: the path of the file, from the root of the repository.
        function: the qualified name of the function, empty at the top level.
        kind: the kind of the change, for the choice of a mixed sample.
        line: the number of the first line that changes.
        before: the lines that change, stripped.
        after: the same lines after the change.
        start: the position of the first byte that changes.
        end: the position after the last one.
        replacement: what replaces these bytes.
    """

    file: str
    function: str
    kind: str
    line: int
    before: str
    after: str
    start: int
    end: int
    replacement: str

    @property
    def name(self) -> str:
        """A name that stays the same when other lines of the file change."""
        return f"{self.file} {self.function}: {self.before} -> {self.after}"

    def apply(self, source: str) -> str:
        """Return the file with the change."""
        text = source.encode()
        return (text[: self.start] + self.replacement.encode() + text[self.end :]).decode()


class _Finder(ast.NodeVisitor):
    """Collects the mutations of a file."""

    def __init__(self, file: str, source: str) -> None:
        self.file = file
        # The columns of a syntax tree count bytes.
        self.source = source.encode()
        self.line_starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.scopes: list[str] = []
        self.mutations: list[Mutation] = []

    def replace(self, kind: str, first: ast.AST, replacement: str, last: ast.AST | None = None):
        """Add the mutation that replaces a node, or the nodes from ``first`` to ``last``."""
        last = last or first
        start = self.line_starts[first.lineno - 1] + first.col_offset
        end = self.line_starts[last.end_lineno - 1] + last.end_col_offset
        line_start = self.line_starts[first.lineno - 1]
        line_end = self.line_starts[last.end_lineno]
        after = self.source[line_start:start] + replacement.encode() + self.source[end:line_end]
        mutation = Mutation(
            file=self.file,
            function=".".join(self.scopes),
            kind=kind,
            line=first.lineno,
            before=_one_line(self.source[line_start:line_end]),
            after=_one_line(after),
            start=start,
            end=end,
            replacement=replacement,
        )
        if mutation.before != mutation.after:
            self.mutations.append(mutation)

    # Statements.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__", "__dir__"):
            return
        self.scopes.append(node.name)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scopes.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave errors alone: what matters is the condition before the error."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone: they hold in every correct program."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in TEXTS:
            return
        is_initial = bool(self.scopes) and self.scopes[-1] == "__init__"
        if isinstance(target, ast.Attribute | ast.Subscript) and not is_initial:
            self.replace("remove assignment", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        target = ast.unparse(node.target)
        self.replace("assign only", node, f"{target} = {ast.unparse(node.value)}")
        self.replace("remove assignment", node, "pass")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not _is_text(node.value):
            self.replace("remove call", node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.replace("remove del", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.replace("remove break", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.replace("remove continue", node, "pass")

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if test == "TYPE_CHECKING":
            return
        self.replace("negate condition", node.test, f"not ({test})")
        self.replace("never", node.test, "False")
        if not isinstance(node.body[-1], ast.Raise):
            self.replace("always", node.test, "True")
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        context = node.items[-1]
        if len(node.items) == 1 and context.optional_vars is None:
            self.replace("remove with", node, "if True", last=context.context_expr)
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        if node.finalbody:
            self.replace("remove finally", node.finalbody[0], "pass", last=node.finalbody[-1])
        self.generic_visit(node)

    # Expressions.

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave text alone."""

    def visit_Call(self, node: ast.Call) -> None:
        if _is_text(node):
            return
        name = _called_name(node)
        if isinstance(node.func, ast.Name) and name in FUNCTIONS:
            self.replace("other function", node.func, FUNCTIONS[name])
        for index, keyword in enumerate(node.keywords):
            if keyword.arg in TEXTS or keyword.arg is None:
                continue
            call = deepcopy(node)
            del call.keywords[index]
            self.replace("remove argument", node, ast.unparse(call))
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in TEXTS:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        other = COMPARISONS[type(node.ops[0])]
        comparison = ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)
        self.replace("compare", node, ast.unparse(comparison))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.replace("and, or", node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        for index in range(len(node.values)):
            values = [*node.values[:index], *node.values[index + 1 :]]
            self.replace("remove operand", node, f"({ast.unparse(ast.BoolOp(node.op, values))})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.replace("remove not", node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.replace("negate condition", node.test, f"(not ({ast.unparse(node.test)}))")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = OPERATORS.get(type(node.op))
        if other is not None:
            result = ast.BinOp(node.left, other(), node.right)
            self.replace("arithmetic", node, f"({ast.unparse(result)})")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.replace("remove filter", condition, "True")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in REDUCTIONS:
            value = ast.unparse(node.value)
            self.replace("other reduction", node, f"{value}.{REDUCTIONS[node.attr]}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("boolean", node, str(not node.value))
        elif isinstance(node.value, int | float):
            self.replace("number", node, repr(node.value + 1))


def find_mutations(file: str, source: str) -> list[Mutation]:
    """Return the mutations of a file, in the order of its syntax tree.

    Args:
        file: the path of the file, from the root of the repository.
        source: the text of the file.
    """
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.mutations


def sample(sources: dict[str, str], seed: int) -> Iterator[Mutation]:
    """Yield mutations in an order that depends on the seed alone; the files take turns.

    The kinds of mutations of a file are equally likely: common kinds would otherwise hide the
    others. At most one mutation of a line is drawn.

    Args:
        sources: the text of each file.
        seed: the seed of the order.
    """
    queues = []
    for file, source in sources.items():
        queues.append(_in_random_order(file, source, random.Random(f"{seed} {file}")))
    while queues:
        for queue in list(queues):
            mutation = next(queue, None)
            if mutation is None:
                queues.remove(queue)
            else:
                yield mutation


def _in_random_order(file: str, source: str, random_order: random.Random) -> Iterator[Mutation]:
    """Yield the mutations of a file: first a kind is drawn, then a mutation of that kind."""
    by_kind = defaultdict(list)
    for mutation in find_mutations(file, source):
        by_kind[mutation.kind].append(mutation)
    drawn_lines = set()
    while by_kind:
        kind = random_order.choice(sorted(by_kind))
        mutation = random_order.choice(by_kind[kind])
        by_kind[kind].remove(mutation)
        if not by_kind[kind]:
            del by_kind[kind]
        if mutation.line not in drawn_lines and _compiles(mutation.apply(source)):
            drawn_lines.add(mutation.line)
            yield mutation


def _called_name(call: ast.Call) -> str:
    """Return the last name of what is called; empty for other expressions."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    if isinstance(call.func, ast.Name):
        return call.func.id
    return ""


def _is_text(call: ast.Call) -> bool:
    """Say whether a call only tells people something, or types to a checker."""
    name = _called_name(call)
    return name in CALLS_OF_TEXT or name.endswith(("Error", "Warning"))


def _compiles(source: str) -> bool:
    """Say whether a text is a program: not every change of a part is one of the whole."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _one_line(text: bytes) -> str:
    """Return lines as one line without indentation."""
    return " ".join(text.decode().split())
