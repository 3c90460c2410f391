"""The shape of the code base: imports, sizes, and where things may be named.

strategies -> tp_flower <- client_apps: the upper packages never import each other, the
library imports neither, and of its modules one knows Flower.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tests.support.files import ROOT, text_of
from tp_flower.protocol.fields import layout_of
from tp_flower.protocol.messages import ACTIONS

PACKAGES = ("tp_flower", "strategies", "client_apps")
MODULES = sorted(
    path for package in PACKAGES for path in (ROOT / package).rglob("*.py")
)
ALLOWED = {
    "tp_flower": {"tp_flower"},
    "strategies": {"strategies", "tp_flower"},
    "client_apps": {"client_apps", "tp_flower"},
}
# the module of the library that may know Flower: messages
FLOWER_MODULES = {"tp_flower/protocol/packet.py"}
IMPORTING = {"__import__", "import_module"}
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_LINES = 700
MIN_LINES = 55
MOST_MODULES = 16
# one that is no longer small, or no longer there, leaves the list
SMALL_MODULES = {
    "strategies/methods/boost/traffic.py",
    "strategies/methods/coreset/page.py",
    "tp_flower/heads/registry.py",
}
LEARNING_OVER_JOINS = {
    f"tp_flower/methods/{name}.py"
    for name in ("admm/iterations", "boost/boosting", "cg/conjugate_gradients")
}
# a file and a command of that name
SPELLED_OUT = {("client_apps/data/key_files.py", "site-key")}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_by(path: Path) -> Iterator[str]:
    return imported_modules(text_of(path))


def imported_modules(source: str) -> Iterator[str]:
    """Yield the dotted names that a module imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # a relative import would hide its package from this test
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and _called(node) in IMPORTING:
            named = [each for each in node.args[:1] if isinstance(each, ast.Constant)]
            yield from (str(each.value) for each in named)


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


@cache
def imported_packages(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported_by(path)}


def test_the_reader_of_imports_sees_every_form():
    source = (
        "import a.b\nfrom c.d import e\nfrom . import f\n"
        "def g():\n    import h\n    importlib.import_module('i.j')\n"
    )
    assert sorted(imported_modules(source)) == [".", "a.b", "c.d", "h", "i.j"]
    assert {name_of(path).split("/")[0] for path in MODULES} == set(PACKAGES)


def offenders(rule: Callable[[Path], object]) -> dict[str, object]:
    """Return what is wrong with the modules that break a rule, by name."""
    found = {name_of(path): rule(path) for path in MODULES}
    return {name: wrong for name, wrong in found.items() if wrong}


def test_imports_are_only_along_the_arrows():
    def others(path: Path) -> object:
        ours = imported_packages(path) & {*PACKAGES, "tests", "scripts"}
        return ours - ALLOWED[name_of(path).split("/")[0]]

    assert offenders(others) == {}


def test_imports_are_absolute_and_no_format_is_read_that_can_run_code():
    assert offenders(lambda path: imported_packages(path) & {"", *UNSAFE}) == {}


def test_flower_is_known_only_where_messages_are_made():
    def knows_flower(path: Path) -> bool:
        name = name_of(path)
        allowed = not name.startswith("tp_flower/") or name in FLOWER_MODULES
        return not allowed and "flwr" in imported_packages(path)

    assert offenders(knows_flower) == {}


def test_a_module_holds_one_idea_and_is_worth_a_file():
    sizes = {
        name_of(path): len(text_of(path).splitlines())
        for path in MODULES
        if path.name != "__init__.py"
    }
    # a room has its messages and settings in files of these names, however few
    few = re.compile(r"tp_flower/methods/\w+/(messages|settings)\.py")
    wrong = {
        name
        for name, size in sizes.items()
        if size > MAX_LINES or (size < MIN_LINES and not few.fullmatch(name))
    }
    assert wrong - SMALL_MODULES == set()


def test_a_folder_has_few_modules():
    modules = [path for path in MODULES if path.name != "__init__.py"]
    for paths in (modules, TESTS):
        for folder, count in Counter(path.parent for path in paths).items():
            assert count <= MOST_MODULES, (
                f"{folder.relative_to(ROOT)} has {count} modules, of at most "
                f"{MOST_MODULES}: move some into a folder of their own"
            )


def room(path: Path) -> str:
    """Return the folder below a package; a module beside the folders is its own.

    Below ``tp_flower/methods``, each folder is the room of a method.
    """
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: 3 if parts[:2] == ("tp_flower", "methods") else 2])


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms, other than its own, that a module imports from."""
    rooms = set()
    for module in imported_by(path):
        if module.split(".")[0] in PACKAGES:
            target = ROOT / module.replace(".", "/")
            is_package = target.is_dir()
            rooms.add(room(target / "__init__.py" if is_package else target))
    return rooms - {room(path)}


def test_no_rooms_import_each_other_in_a_circle():
    left: dict[str, set[str]] = {}
    for path in MODULES:
        left.setdefault(room(path), set()).update(imported_rooms(path))
    # the face of a whole package imports from its rooms, and only its app imports it
    faces = [f"{package}/__init__.py" for package in PACKAGES]
    left = {name: rooms for name, rooms in left.items() if name not in faces}
    while ground := {name for name, rooms in left.items() if not rooms & set(left)}:
        left = {name: rooms for name, rooms in left.items() if name not in ground}
    assert left == {}


def test_sites_need_no_settings():
    """Requests carry what a site needs; the run config is the server's."""

    def reads_settings(path: Path) -> bool:
        is_of_a_site = name_of(path).startswith("client_apps/")
        of_settings = re.compile(r"tp_flower\.settings").match
        return is_of_a_site and any(map(of_settings, imported_by(path)))

    assert offenders(reads_settings) == {}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def dashed_literals(path: Path) -> set[str]:
    """Return the strings of a module that look like a key, of the wire or a config."""
    return {
        node.value
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", node.value)
    }


def test_no_key_is_typed_on_both_sides():
    """It is declared once, in the library, and both sides read it from there."""
    sides = defaultdict(set)
    for path in MODULES:
        package = name_of(path).split("/")[0]
        for literal in dashed_literals(path) if package != "tp_flower" else ():
            sides[literal].add(package)
    assert [literal for literal, packages in sides.items() if len(packages) > 1] == []


def test_sites_type_no_names_of_the_wire():
    """They read the fields of messages, which alone know how these are called."""
    names = set()
    kinds = set()
    for message in (
        message for action in ACTIONS.values() for message in action.messages
    ):
        bodies = [message, layout_of(message).part]
        for layout in (layout_of(body) for body in bodies if body is not None):
            names |= {*layout.values, *layout.arrays, *layout.families}
        # a ledger calls some releases as a field is called
        kinds |= {kind for disclosure in message.discloses for kind in disclosure.kinds}
    typed = {
        (name_of(path), literal)
        for path in MODULES
        if name_of(path).startswith("client_apps/")
        for literal in dashed_literals(path) & (names - kinds)
    }
    assert typed == SPELLED_OUT


def test_methods_have_hooks_instead_of_cases():
    """No module asks which method or loss trains: it asks the method, or the loss."""
    cases = re.compile(
        r"\bis_clustering\b|\bis_expanded\b|\b(family|loss\.name) (==|!=|in|not in|is)"
    )

    def asks(path: Path) -> list[str]:
        is_declaration = name_of(path) == "tp_flower/methods/__init__.py"
        return [] if is_declaration else cases.findall(text_of(path))

    assert offenders(asks) == {}


def test_nobody_asks_an_objective_of_which_family_it_is():
    """What depends on the family is a method of the objective or of its response."""
    cases = re.compile(
        r"\bis_regression\b|\.(?:gradient|hessian|prox)\([^()]*\blabels\b|"
        r"\bisinstance\([^()]*\b(?:Objective|Squared|Logistic|Softmax|KMeans)\b"
    )

    def asks(path: Path) -> list[str]:
        is_in_the_room = name_of(path).startswith("tp_flower/objectives/")
        return [] if is_in_the_room else cases.findall(text_of(path))

    assert offenders(asks) == {}


def test_only_a_head_makes_scores_of_the_tables_vectors():
    """Others expand vectors to the joined rows, and let the head combine them."""
    # a model of a single table has no head, and what leaves with a model imports none
    elsewhere = (
        *("tp_flower/heads/", "tp_flower/methods/personalised/"),
        "tp_flower/export/runner/",
    )
    sums = re.compile(r"\bbase(?:_scores?)?\b\]? \+|\+ (?:\w+\.)*base(?:_scores?)?\b")

    def adds(path: Path) -> list[str]:
        is_page = name_of(path).startswith("strategies/report_page/")
        if is_page or name_of(path).startswith(elsewhere):
            return []
        return sums.findall(text_of(path))

    assert offenders(adds) == {}


def test_nobody_indexes_by_joined_row_outside_their_room():
    """Vectors over joined rows are behind JoinedRows, and kernels compute on them."""

    def indexes(path: Path) -> bool:
        is_in_the_room = name_of(path).startswith("tp_flower/joins/")
        return not is_in_the_room and bool(re.search(r"\brow_of\b", text_of(path)))

    assert offenders(indexes) == {}

    def divides(path: Path) -> list[str]:
        # columns of scores are divided among threads in metrics
        is_learning = name_of(path) in LEARNING_OVER_JOINS
        divisions = re.compile(r"\brun_in_threads\b|\bblocks(?:_of)?\b")
        return divisions.findall(text_of(path)) if is_learning else []

    assert offenders(divides) == {}


def test_tests_import_helpers_only():
    """What two test modules need lives in tests/support."""
    importers = {
        name_of(path)
        for path in TESTS
        for module in imported_by(path)
        if re.match(r"tests\.(?!support)", module)
    }
    assert not importers
