"""The models of exported parts as ONNX graphs, for other runtimes than numpy.

A graph has the input ``features``, float32 (n, d), a table's encoded columns, with one
more where the model reads the regions of another table's rows: their number, NaN for
none. Its output is ``scores``, double (n, w): all that the model says but effects of
keys. It computes in double precision, as the runner does.

Reference:
    ONNX's operators (https://onnx.ai/onnx/operators), of which ``TreeEnsemble`` is in
    version 5 of ``ai.onnx.ml``.
"""

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from types import ModuleType
from typing import Any, Final

import numpy as np

from tp_flower.arrays import MISSING, AnyArray, FloatArray
from tp_flower.errors import ModelError, load_extra
from tp_flower.export.runner.scoring import FARTHEST
from tp_flower.export.runner.trees import NAN, ZERO

INPUT: Final = "features"
OUTPUT: Final = "scores"
_OPSET: Final = 18
_ML: Final = "ai.onnx.ml"
_ML_OPSET: Final = 5
_IR: Final = 10
_LEQ, _EQ, _MEMBER = 0, 4, 6
"""Modes of a node: x <= split, x = split, x is in a set."""
_SUM: Final = 1  # of the trees' values


def onnx_bytes(part: Mapping[str, Any], arrays: Mapping[str, AnyArray]) -> bytes:
    """Return the graph of a part's model.

    Args:
        part: `part.json`.
        arrays: `part.npz`.

    Raises:
        ModelError: onnx is not installed, or a tree takes 0 for missing.
    """
    graph = _Graph(load_extra("onnx", "ONNX graphs", "onnx"))
    rows = graph.add("Cast", INPUT, to=graph.double)
    graph.finish(_GRAPHS[part["model"]](graph, rows, part, arrays))
    width = part["width"] + int(part["regions"] > 1)
    return graph.serialised(width, part["outputs"])


class _Graph:
    """Nodes and constants of a graph, by the names of their outputs."""

    def __init__(self, onnx: ModuleType) -> None:
        self._onnx = onnx
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self.double = onnx.TensorProto.DOUBLE
        self.float = onnx.TensorProto.FLOAT

    def add(self, operator: str, *inputs: str, domain: str = "", **how: Any) -> str:
        """Add a node, and return the name of its output."""
        name = f"{operator.lower()}{len(self._nodes)}"
        node = self._onnx.helper.make_node(
            operator, inputs, [name], domain=domain, **how
        )
        self._nodes.append(node)
        return name

    def constant(self, array: AnyArray) -> str:
        """Add a constant, and return its name."""
        name = f"constant{len(self._constants)}"
        self._constants.append(self.tensor(array, name))
        return name

    def number(self, value: float) -> str:
        """Add a number, and return its name."""
        return self.constant(np.array(value, np.float64))

    def tensor(self, array: AnyArray, name: str = "") -> Any:
        """Return an array as a tensor."""
        return self._onnx.numpy_helper.from_array(np.array(array, order="C"), name)

    def times(self, rows: str, weights: AnyArray) -> str:
        """Add the product of rows with a matrix."""
        return self.add("MatMul", rows, self.constant(weights.astype(np.float64)))

    def plus(self, values: str, array: AnyArray) -> str:
        """Add a constant to values."""
        return self.add("Add", values, self.constant(array.astype(np.float64)))

    def finish(self, name: str) -> None:
        """Let values be the output."""
        self._nodes.append(self._onnx.helper.make_node("Identity", [name], [OUTPUT]))

    def serialised(self, width: int, outputs: int) -> bytes:
        """Return the model, checked."""
        helper = self._onnx.helper
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            self._nodes,
            "scores of a table's rows",
            [value(INPUT, self.float, ["n", width])],
            [value(OUTPUT, self.double, ["n", outputs])],
            self._constants,
        )
        opsets = [
            helper.make_opsetid("", _OPSET),
            helper.make_opsetid(_ML, _ML_OPSET),
        ]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR)
        self._onnx.checker.check_model(model)
        content: bytes = model.SerializeToString()
        return content


def _linear(
    graph: _Graph, rows: str, part: Mapping[str, Any], arrays: Mapping[str, AnyArray]
) -> str:
    weights = arrays["weights"]
    scores = graph.times(rows, weights[: part["width"]])
    if len(weights) > part["width"]:
        scores = graph.plus(scores, weights[-1])
    return scores


def _centres(
    graph: _Graph, rows: str, _: Mapping[str, Any], arrays: Mapping[str, AnyArray]
) -> str:
    centres = arrays["weights"]
    squares = graph.add("Mul", rows, rows)
    lengths = graph.times(squares, np.ones_like(centres.T))
    products = graph.times(rows, -2.0 * centres.T)
    sums = graph.add("Add", lengths, products)
    return graph.add("Relu", graph.plus(sums, (centres**2).sum(axis=1)))


def _network(
    graph: _Graph, rows: str, part: Mapping[str, Any], arrays: Mapping[str, AnyArray]
) -> str:
    values = rows
    for layer in range(part["layers"]):
        if layer:
            values = graph.add("Relu", values)
        values = graph.times(values, arrays[f"weights{layer}"].T)
        if f"bias{layer}" in arrays:
            values = graph.plus(values, arrays[f"bias{layer}"])
    return graph.add("Mul", values, graph.number(part["scale"]))


def _trees(
    graph: _Graph, rows: str, part: Mapping[str, Any], arrays: Mapping[str, AnyArray]
) -> str:
    """Add all rounds: their trees are one ensemble, beside the linear models."""
    outputs = part["outputs"]
    # there may be no round
    first = graph.add("Gather", rows, graph.constant(np.array([0])), axis=1)
    terms = [graph.times(first, np.zeros((1, outputs)))]
    is_missing = graph.add("LessOrEqual", rows, graph.number(MISSING))
    rows = graph.add("Where", is_missing, graph.number(np.nan), rows)
    ensemble = _Ensemble(outputs)
    for number, each in enumerate(part["rounds"]):
        if "trees" in each:
            ensemble.add_trees(arrays, each["trees"], each["step"])
            continue
        weights = each["step"] * arrays[f"linear{number}"]
        if part["sparse"]:
            terms.append(_sparse_numbers(graph, rows, each["linear"], weights))
        else:
            terms.append(_numbers(graph, rows, each["linear"], weights))
        ensemble.add_categories(each["linear"], weights)
    if ensemble.roots:
        terms.append(ensemble.added_to(graph, rows))
    return reduce(partial(graph.add, "Add"), terms)


def _numbers(
    graph: _Graph, rows: str, columns: Mapping[str, Any], weights: FloatArray
) -> str:
    """Add what a linear model says of numbers, and of which are missing."""
    scaled = _scaled(graph, rows, columns)
    low, high = map(graph.number, (-FARTHEST, FARTHEST))
    count = len(columns["means"])
    numbers = graph.times(
        _rounded(graph, graph.add("Clip", scaled, low, high)), weights[:count]
    )
    if not columns["missing"]:
        return numbers
    chosen = graph.constant(np.array(columns["missing"], np.int64))
    gathered = graph.add("Gather", rows, chosen, axis=1)
    absent = graph.add("Cast", graph.add("IsNaN", gathered), to=graph.double)
    of_absent = graph.times(absent, weights[count : count + len(columns["missing"])])
    return graph.add("Add", numbers, of_absent)


def _sparse_numbers(
    graph: _Graph, rows: str, columns: Mapping[str, Any], weights: FloatArray
) -> str:
    """Add what a linear model of sparse rows says of numbers, which are not cut."""
    scaled = _rounded(graph, _scaled(graph, rows, columns))
    return graph.times(scaled, weights[: len(columns["means"])])


def _scaled(graph: _Graph, rows: str, columns: Mapping[str, Any]) -> str:
    """Add the numbers, scaled, 0 where they are missing."""
    names = list(columns["means"])
    chosen = graph.constant(np.array([int(name) for name in names], np.int64))
    means = np.array([columns["means"][name] for name in names], np.float64)
    scales = np.array([columns["scales"][name] for name in names], np.float64)
    values = graph.plus(graph.add("Gather", rows, chosen, axis=1), -means)
    values = graph.add("Div", values, graph.constant(scales))
    nothing = graph.number(0.0)
    return graph.add("Where", graph.add("IsNaN", values), nothing, values)


def _rounded(graph: _Graph, values: str) -> str:
    """Round values to float32, as the models were trained on them."""
    rounded = graph.add("Cast", values, to=graph.float)
    return graph.add("Cast", rounded, to=graph.double)


_GRAPHS: Final = {
    "linear": _linear,
    "centres": _centres,
    "network": _network,
    "trees": _trees,
}


class _Ensemble:
    """Trees of one operator, of whose ``roots`` each is a node.

    A node has a column, a mode, a split, whether missing values are true, and the
    children of true and false: nodes by their numbers, leaf k as -1 - k.
    """

    def __init__(self, outputs: int) -> None:
        self._outputs = outputs
        self._nodes: list[tuple[int, int, float, int, int, int]] = []
        self._members: list[float] = []
        self._weights: list[float] = []
        self._targets: list[int] = []
        self.roots: list[int] = []

    def add_trees(
        self, arrays: Mapping[str, AnyArray], span: Sequence[int], step: float
    ) -> None:
        """Add trees of a part's arrays, each of whose values counts so much."""
        first, last = span
        for tree in range(first, last):
            target = (tree - first) % self._outputs
            root = int(arrays["tree.root"][tree])
            child = self._added(arrays, root, step, target)
            if child < 0:
                # no tree is a leaf alone
                self._nodes.append((0, _LEQ, 0.0, 0, child, child))
                child = len(self._nodes) - 1
            self.roots.append(child)

    def add_categories(self, columns: Mapping[str, Any], weights: FloatArray) -> None:
        """Add the weights of categories: of each a tree of one node."""
        index = len(columns["means"]) + len(columns["missing"])
        for column, codes in columns["categories"].items():
            for code in codes:
                for target in range(self._outputs):
                    children = (
                        self._leaf(weights[index, target], target),
                        self._leaf(0.0, target),
                    )
                    self.roots.append(len(self._nodes))
                    self._nodes.append((int(column), _EQ, float(code), 0, *children))
                index += 1

    def added_to(self, graph: _Graph, rows: str) -> str:
        """Add the operator, and return its output."""
        columns, modes, splits, missing, true, false = zip(*self._nodes, strict=True)
        return graph.add(
            "TreeEnsemble",
            rows,
            domain=_ML,
            n_targets=self._outputs,
            aggregate_function=_SUM,
            tree_roots=self.roots,
            nodes_featureids=columns,
            nodes_modes=graph.tensor(np.array(modes, np.uint8)),
            nodes_splits=graph.tensor(np.array(splits, np.float64)),
            nodes_missing_value_tracks_true=missing,
            nodes_truenodeids=[child if child >= 0 else -1 - child for child in true],
            nodes_falsenodeids=[child if child >= 0 else -1 - child for child in false],
            nodes_trueleafs=[int(child < 0) for child in true],
            nodes_falseleafs=[int(child < 0) for child in false],
            leaf_weights=graph.tensor(np.array(self._weights, np.float64)),
            leaf_targetids=self._targets,
            membership_values=graph.tensor(np.array(self._members, np.float64)),
        )

    def _leaf(self, weight: float, target: int) -> int:
        """Add a leaf, and return it as a child."""
        self._weights.append(float(weight))
        self._targets.append(target)
        return -len(self._weights)

    def _added(
        self, arrays: Mapping[str, AnyArray], root: int, step: float, target: int
    ) -> int:
        """Add the nodes below a root; return it as a child.

        Parents come first, then what is true: some runtimes read sets in the order of
        the nodes, others in that of the branches.
        """
        children = {}
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if node >= 0:
                left = int(arrays["tree.left"][node])
                right = int(arrays["tree.right"][node])
                children[node] = left, right
                waiting += [right, left]
        first = len(self._nodes)
        number = {node: first + index for index, node in enumerate(children)}

        def as_child(node: int) -> int:
            if node >= 0:
                return number[node]
            return self._leaf(step * arrays["tree.value"][-1 - node], target)

        for node, (left, right) in children.items():
            node_of_both = self._node(arrays, node, as_child(left), as_child(right))
            self._nodes.append(node_of_both)
        return as_child(root)

    def _node(
        self, arrays: Mapping[str, AnyArray], node: int, left: int, right: int
    ) -> tuple[int, int, float, int, int, int]:
        """Return column, mode, split, whether missing values are true, and children."""
        column = int(arrays["tree.column"][node])
        number = int(arrays["tree.set"][node])
        if number >= 0:
            start, stop = arrays["tree.set-start"][number : number + 2]
            words = arrays["tree.set-words"][start:stop].astype("<u4")
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            # sets end in NaN
            self._members += [*np.flatnonzero(bits).astype(float), np.nan]
            return column, _MEMBER, 0.0, 0, left, right
        kind = arrays["tree.missing"][node]
        threshold = float(arrays["tree.threshold"][node])
        if kind == ZERO:
            raise ModelError("a tree that takes 0 for missing has no ONNX graph")
        tracks_left = threshold >= 0.0
        if kind == NAN:
            tracks_left = bool(arrays["tree.default-left"][node])
        return column, _LEQ, threshold, int(tracks_left), left, right
