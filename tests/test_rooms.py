"""The rooms of `amir/`: who imports whom, drawn from the imports; no circles, no import from a room above."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRAINER, KERNELS = ROOT / "amir", ROOT / "kernels" / "amir_kernels"
ROOMS = (
    ("errors", "other_names"),
    ("config",),
    ("config_reader", "recipes"),
    ("tokens",),
    ("distributed",),
    ("tasks",),
    ("rewards",),
    ("policy",),
    ("rollout",),
    ("update",),
    ("run",),
    ("trainer",),
    ("theory",),
    ("doctor",),
    ("", "__main__"),
)
"""From the lowest to the highest: a module imports from its own room and from rooms below it."""
MOST_MODULES = 12

pytestmark = pytest.mark.skipif(not KERNELS.exists(), reason="the sources are not here: tests run against a wheel")


@cache
def imports(package: Path) -> dict[str, frozenset[str]]:
    """Each module below a package, by its dotted name there, and the modules of the package that it imports.

    Imports inside functions and under TYPE_CHECKING count. A package's own gathering of its modules does not.
    """
    paths = {name_of(path, package): path for path in package.rglob("*.py")}
    graph = {}
    for name, path in paths.items():
        here = name.split(".") if name else []
        parents = here if path.name == "__init__.py" else here[:-1]
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*parents[: len(parents) - node.level + 1], *filter(None, (node.module or "").split("."))]
                for alias in node.names:
                    full = ".".join([*base, alias.name])
                    imported.add(full if full in paths else ".".join(base))
        inside = f"{name}." if name else ""
        gathered = {other for other in imported if path.name == "__init__.py" and other.startswith(inside)}
        own_package = {other for other in imported if paths[other].name == "__init__.py" and name.startswith(other)}
        graph[name] = frozenset(imported - gathered - own_package - {name})
    return graph


def name_of(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def circles(graph: dict[str, frozenset[str]]) -> list[set[str]]:
    """Groups of modules that reach each other."""

    @cache
    def reach(start: str) -> frozenset[str]:
        seen, waiting = set(), [start]
        while waiting:
            for other in graph.get(waiting.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return frozenset(seen)

    return [group for name in graph if name in reach(name) for group in [{o for o in reach(name) if name in reach(o)}]]


def level(module: str) -> int:
    room = module.partition(".")[0]
    return next(place for place, rooms in enumerate(ROOMS) if room in rooms)


def upward(graph: dict[str, frozenset[str]]) -> list[str]:
    """Imports from a room above the module's own."""
    return sorted(f"{name} imports {other}" for name in graph for other in graph[name] if level(other) > level(name))


@pytest.mark.parametrize("package", [TRAINER, KERNELS], ids=lambda path: path.name)
def test_no_module_imports_in_a_circle(package):
    assert circles(imports(package)) == []


def test_every_module_imports_from_its_own_room_and_those_below():
    assert upward(imports(TRAINER)) == []


def test_a_circle_and_an_upward_import_would_be_seen():
    graph = imports(TRAINER) | {"errors": frozenset({"trainer"})}
    assert "errors imports trainer" in upward(graph)
    assert any({"errors", "trainer", "config"} <= group for group in circles(graph))


def test_every_room_is_there_and_no_other():
    rooms = {name.partition(".")[0] for name in imports(TRAINER)}
    assert rooms == {room for rooms in ROOMS for room in rooms}


def test_few_modules_stand_flat():
    flat = [path.name for path in TRAINER.glob("*.py")]
    assert len(flat) <= MOST_MODULES, flat


def test_every_exception_stands_in_the_tree_of_errors():
    """Exceptions are defined in `errors.py` alone, and its docstring draws each of them."""
    defined = {}
    for path in TRAINER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = " ".join(map(ast.unparse, node.bases)) if isinstance(node, ast.ClassDef) else ""
            if re.search(r"(Error|Exception|Stopped|Refused)\b", bases):
                defined[node.name] = path.name
    tree = ast.get_docstring(ast.parse((TRAINER / "errors.py").read_text()))
    assert set(defined.values()) == {"errors.py"}
    assert all(re.search(rf"── {name}\b", tree) for name in defined), sorted(defined)
