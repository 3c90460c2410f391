"""The methods that a run can train by: the one file of the server that names them.

The server half of a method is a *room* of ``strategies/methods``, a module or a folder
of the method's name. A method from elsewhere is added by :func:`register`. A room is
named here by text, and imported when a run needs it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tp_flower.methods.method import import_reference

if TYPE_CHECKING:
    from strategies.training.row_drawing import RowDrawing
    from strategies.training.strategy import TrainingStrategy
    from tp_flower.reports.blocks import Blocks, Record
    from tp_flower.settings import Settings


@dataclass(frozen=True)
class ServerRoom:
    """The server half of a method: where its pieces are, each as ``module:name``.

    Attributes:
        strategy: the subclass of
            :class:`~strategies.training.strategy.TrainingStrategy` that trains by it.
        title: the name for people, if it is another.
        models: the function from settings to the words for what is trained, by keys of
            a run's config; "" if these are the models that the settings name.
        page: the function that yields the blocks of a report's page that the method
            adds, from any report; "" for none.
    """

    strategy: str
    title: str = ""
    models: str = ""
    page: str = ""


_METHODS: Final = "strategies.methods"
ROOMS: Final[dict[str, ServerRoom]] = {
    "admm": ServerRoom(f"{_METHODS}.admm:TablePuppetADMM", title="ADMM"),
    "cg": ServerRoom(
        f"{_METHODS}.cg:TablePuppetCG",
        page=f"{_METHODS}.moments.errors_page:sections",
    ),
    "sgd": ServerRoom(f"{_METHODS}.sgd.strategy:TablePuppetSGD", title="SGD"),
    "gd": ServerRoom(f"{_METHODS}.sgd.strategy:GradientDescent", title="GD"),
    "boost": ServerRoom(
        f"{_METHODS}.boost.strategy:TablePuppetBoost",
        models=f"{_METHODS}.boost.strategy:models_text",
    ),
    "moments": ServerRoom(
        f"{_METHODS}.moments.strategy:TablePuppetMoments",
        page=f"{_METHODS}.moments.page:sections",
    ),
    "coreset-ridge": ServerRoom(
        f"{_METHODS}.coreset.ridge:CoresetRidge",
        page=f"{_METHODS}.coreset.page:sections",
    ),
    "coreset-kmeans": ServerRoom(
        f"{_METHODS}.coreset.kmeans:CoresetKMeans",
        models=f"{_METHODS}.coreset.kmeans:models_text",
    ),
    "personalised": ServerRoom(
        f"{_METHODS}.personalised.strategy:Personalised",
        page=f"{_METHODS}.personalised.page:sections",
    ),
}
"""By the name that the setting ``strategy`` has."""


ROW_DRAWING: Final = f"{_METHODS}.coreset.drawing:CoresetDrawing"


def register(name: str, room: ServerRoom) -> None:
    """Add the server half of a method; ValueError if there is one of its name."""
    if ROOMS.setdefault(name, room) is not room:
        raise ValueError(f"strategy {name!r} is registered: choose another name")


class Strategies(Mapping[str, "type[TrainingStrategy]"]):
    """The classes of the strategies that train, by the names of their methods."""

    def __getitem__(self, name: str) -> "type[TrainingStrategy]":
        strategy: type[TrainingStrategy] = import_reference(ROOMS[name].strategy)
        return strategy

    def __iter__(self) -> Iterator[str]:
        return iter(ROOMS)

    def __len__(self) -> int:
        return len(ROOMS)


STRATEGIES: Final = Strategies()


def find_class(name: str) -> "type[TrainingStrategy] | None":
    """Return the class of a strategy by its own name; None if there is none."""
    for method, room in ROOMS.items():
        if room.strategy.endswith(f":{name}"):
            return STRATEGIES[method]
    return None


def title_of(name: str) -> str:
    """Return a method's name for people, even if there is no such method.

    >>> title_of("sgd"), title_of("cg")
    ('SGD', 'cg')
    """
    return (ROOMS[name].title if name in ROOMS else "") or name


def models_text(name: str, settings: Mapping[str, object]) -> str:
    """Return the name of the models of a method; "" if the settings name them.

    >>> models_text("boost", {"strategy": "boost"}), models_text("sgd", {})
    ('boosted trees', '')
    """
    reference = ROOMS[name].models if name in ROOMS else ""
    if not reference:
        return ""
    return str(import_reference(reference)(settings))


def page(name: str) -> Callable[["Record"], "Blocks"]:
    """Return the function of a method that adds to a report's page."""
    sections: Callable[[Record], Blocks] = import_reference(ROOMS[name].page)
    return sections


def pages() -> Iterator[Callable[["Record"], "Blocks"]]:
    """Yield the functions that add to a report's page."""
    return (page(name) for name, room in ROOMS.items() if room.page)


def row_drawing(settings: "Settings") -> "RowDrawing":
    """Return the step that draws the joined rows to train on."""
    drawing: RowDrawing = import_reference(ROW_DRAWING)(settings)
    return drawing
