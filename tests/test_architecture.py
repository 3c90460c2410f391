"""The shape of the code base: who imports whom, and how large a module gets.

strategies -> tp_flower <- client_apps: the upper packages never import each other, the
library imports neither, and of its modules one knows Flower.
"""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
MAX_LINES = 600
MOST_MODULES = 15
LARGE_FOLDERS: dict[str, int] = {}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(source: str) -> Iterator[str]:
    """Yield the dotted names that a module imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # a relative import would hide its package from this test
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and _called(node) in {
            "__import__",
            "import_module",
        }:
            yield from (
                str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)
            )


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


@cache
def imported_packages(path: Path) -> set[str]:
    modules = imported_modules(path.read_text(encoding="utf-8"))
    return {module.split(".")[0] for module in modules}


def test_the_reader_of_imports_sees_every_form() -> None:
    source = (
        "import a.b\nfrom c.d import e\nfrom . import f\n"
        "def g():\n    import h\n    importlib.import_module('i.j')\n"
    )
    assert sorted(imported_modules(source)) == [".", "a.b", "c.d", "h", "i.j"]


def test_there_is_something_to_check() -> None:
    assert {name_of(path).split("/")[0] for path in MODULES} == set(PACKAGES)


def offenders(rule: Callable[[Path], object]) -> dict[str, object]:
    """Return what is wrong with the modules that break a rule, by name."""
    found = {name_of(path): rule(path) for path in MODULES}
    return {name: wrong for name, wrong in found.items() if wrong}


def test_imports_are_only_along_the_arrows() -> None:
    def others(path: Path) -> object:
        ours = imported_packages(path) & {*PACKAGES, "tests", "scripts"}
        return ours - ALLOWED[name_of(path).split("/")[0]]

    assert offenders(others) == {}


def test_imports_are_absolute() -> None:
    assert offenders(lambda path: "" in imported_packages(path)) == {}


def test_flower_is_known_only_where_messages_are_made() -> None:
    def knows_flower(path: Path) -> bool:
        name = name_of(path)
        allowed = not name.startswith("tp_flower/") or name in FLOWER_MODULES
        return not allowed and "flwr" in imported_packages(path)

    assert offenders(knows_flower) == {}


def test_no_format_is_read_that_can_run_code() -> None:
    assert offenders(lambda path: imported_packages(path) & UNSAFE) == {}


def test_a_module_holds_one_idea() -> None:
    def excess(path: Path) -> int:
        return max(len(path.read_text(encoding="utf-8").splitlines()) - MAX_LINES, 0)

    assert offenders(excess) == {}


def test_a_folder_has_few_modules() -> None:
    modules = [path for path in MODULES if path.name != "__init__.py"]
    sizes = Counter(path.parent.relative_to(ROOT).as_posix() for path in modules)
    larger = {folder: size for folder, size in sizes.items() if size > MOST_MODULES}
    assert larger == LARGE_FOLDERS


def room(path: Path) -> str:
    """Return the folder below a package; a module beside the folders is its own."""
    return "/".join(path.relative_to(ROOT).parts[:2])


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms, other than its own, that a module imports from."""
    rooms = set()
    for module in imported_modules(path.read_text(encoding="utf-8")):
        if module.split(".")[0] in PACKAGES:
            target = ROOT / module.replace(".", "/")
            is_package = target.is_dir()
            rooms.add(room(target / "__init__.py" if is_package else target))
    return rooms - {room(path)}


def test_no_rooms_import_each_other_in_a_circle() -> None:
    left: dict[str, set[str]] = {}
    for path in MODULES:
        left.setdefault(room(path), set()).update(imported_rooms(path))
    # the face of a whole package imports from its rooms, and only its app imports it
    faces = [f"{package}/__init__.py" for package in PACKAGES]
    left = {name: rooms for name, rooms in left.items() if name not in faces}
    while ground := {name for name, rooms in left.items() if not rooms & set(left)}:
        left = {name: rooms for name, rooms in left.items() if name not in ground}
    assert left == {}
