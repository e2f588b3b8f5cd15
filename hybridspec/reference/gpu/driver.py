"""The few calls of the CUDA driver that graphs with a SWITCH node need, through ctypes.

torch has no API for SWITCH nodes, and the Python bindings of the driver change signatures between
major versions; the exported C symbols used here do not. Struct layouts are those of cuda.h 13.0.
Handles of graphs, nodes and modules are plain ints.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from hybridspec.errors import EnvironmentMissing

LIBRARY = "libcuda.so.1"
# IF and WHILE nodes came earlier; SWITCH nodes came with CUDA 12.8.
SWITCH_VERSION = 12080
NODE_KINDS = {
    0: "kernel",
    1: "memcpy",
    2: "memset",
    3: "host",
    4: "graph",
    5: "empty",
    6: "event wait",
    7: "event record",
    8: "semaphore signal",
    9: "semaphore wait",
    10: "memory alloc",
    11: "memory free",
    12: "batch memory operation",
    13: "conditional",
}
_CONDITIONAL_NODE = 13
_SWITCH = 2
_ASSIGN_DEFAULT_AT_LAUNCH = 1
_SYMBOLS = (
    "cuCtxGetCurrent",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuGraphCreate",
    "cuGraphDestroy",
    "cuGraphAddChildGraphNode",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddNode_v2",
    "cuGraphChildGraphNodeGetGraph",
    "cuGraphConditionalHandleCreate",
    "cuGraphGetNodes",
    "cuGraphNodeGetType",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecDestroy",
    "cuGraphUpload",
    "cuGraphLaunch",
)


class ConditionalNodeParams(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS."""

    _fields_ = [
        ("handle", ctypes.c_uint64),
        ("type", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("phGraph_out", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    ]


class _NodeParamsUnion(ctypes.Union):
    _fields_ = [("conditional", ConditionalNodeParams), ("reserved1", ctypes.c_longlong * 29)]


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("reserved0", ctypes.c_int * 3),
        ("kind", _NodeParamsUnion),
        ("reserved2", ctypes.c_longlong),
    ]


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        ("gridDimX", ctypes.c_uint),
        ("gridDimY", ctypes.c_uint),
        ("gridDimZ", ctypes.c_uint),
        ("blockDimX", ctypes.c_uint),
        ("blockDimY", ctypes.c_uint),
        ("blockDimZ", ctypes.c_uint),
        ("sharedMemBytes", ctypes.c_uint),
        ("kernelParams", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    ]


def check_version(version: int) -> None:
    """Refuse a driver without SWITCH nodes.

    Args:
        version: 1000 x major + 10 x minor, the newest CUDA that the driver serves.
    """
    if version < SWITCH_VERSION:
        raise EnvironmentMissing(
            f"this driver serves CUDA {version // 1000}.{version % 1000 // 10}; SWITCH nodes need "
            f"{SWITCH_VERSION // 1000}.{SWITCH_VERSION % 1000 // 10}: update the driver, or use "
            "--graph-control masked"
        )


class Driver:
    """Checked calls of the driver in the current CUDA context.

    Args:
        library: name of the shared library.

    Raises:
        EnvironmentMissing: no such library, one that is too old, or one without a needed symbol.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError:
            raise EnvironmentMissing(
                f"{library} is not on this machine; SWITCH nodes need the CUDA driver: install it, "
                "or use --graph-control masked"
            ) from None
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.version = version.value
        check_version(self.version)
        missing = [name for name in _SYMBOLS if not hasattr(self._library, name)]
        if missing:
            raise EnvironmentMissing(
                f"{library} lacks {missing[0]}, which SWITCH nodes need: update the driver, or "
                "use --graph-control masked"
            )
        # Modules stay loaded as long as the driver object: graphs hold no reference to them.
        self._functions: dict[tuple[int, str], int] = {}

    def call(self, name: str, *arguments: object) -> None:
        """Call an exported function that returns a CUresult.

        Raises:
            EnvironmentMissing: it failed; names the call and the error.
        """
        function = getattr(self._library, name, None)
        if function is None:
            raise EnvironmentMissing(f"the CUDA driver has no {name}: update it")
        function.restype = ctypes.c_int
        code = function(*arguments)
        if code:
            raise EnvironmentMissing(
                f"the CUDA driver's {name} failed with {self._error_name(code)} ({code}): use "
                "--graph-control masked, which does without"
            )

    def _error_name(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) or not text.value:
            return "an unknown error"
        return text.value.decode()

    def context(self) -> int:
        """The current context; torch makes its primary one current on first use of the device."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            raise EnvironmentMissing(
                "there is no current CUDA context: use the device before graphs are built"
            )
        return context.value

    def function(self, ptx: str, name: str) -> int:
        """A kernel of a PTX text, assembled by the driver; loaded once a context."""
        key = (self.context(), name)
        if key not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            image = ctypes.create_string_buffer(ptx.encode())
            self.call(
                "cuModuleLoadDataEx", ctypes.byref(module), image, ctypes.c_uint(0), None, None
            )
            self.call(
                "cuModuleGetFunction",
                ctypes.byref(function),
                module,
                ctypes.c_char_p(name.encode()),
            )
            self._functions[key] = _value(function)
        return self._functions[key]

    # ------------------------------------------------------------------ building

    def new_graph(self) -> int:
        """An empty graph."""
        graph = ctypes.c_void_p()
        self.call("cuGraphCreate", ctypes.byref(graph), ctypes.c_uint(0))
        return _value(graph)

    def add_child(self, graph: int, after: Sequence[int], child: int) -> int:
        """A node that runs a copy of `child`; whoever owns the memory it works on keeps it."""
        node = ctypes.c_void_p()
        self.call(
            "cuGraphAddChildGraphNode",
            ctypes.byref(node),
            ctypes.c_void_p(graph),
            *_dependencies(after),
            ctypes.c_void_p(child),
        )
        return _value(node)

    def add_single_thread(
        self,
        graph: int,
        after: Sequence[int],
        function: int,
        arguments: Sequence[ctypes._SimpleCData],
    ) -> int:
        """A node that runs a kernel in one thread."""
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in arguments)
        )
        params = KernelNodeParams(
            func=function,
            **{f"{of}Dim{axis}": 1 for of in ("grid", "block") for axis in "XYZ"},
            kernelParams=ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p)),
        )
        node = ctypes.c_void_p()
        self.call(
            "cuGraphAddKernelNode_v2",
            ctypes.byref(node),
            ctypes.c_void_p(graph),
            *_dependencies(after),
            ctypes.byref(params),
        )
        return _value(node)

    def condition(self, graph: int, *, default: int) -> int:
        """A handle for one conditional node of the graph, `default` at every launch."""
        handle = ctypes.c_uint64()
        self.call(
            "cuGraphConditionalHandleCreate",
            ctypes.byref(handle),
            ctypes.c_void_p(graph),
            ctypes.c_void_p(self.context()),
            ctypes.c_uint(default),
            ctypes.c_uint(_ASSIGN_DEFAULT_AT_LAUNCH),
        )
        return handle.value

    def add_switch(self, graph: int, after: Sequence[int], handle: int, count: int) -> list[int]:
        """A SWITCH node; returns its `count` empty body graphs, which the graph owns."""
        params = NodeParams(type=_CONDITIONAL_NODE)
        params.kind.conditional.handle = handle
        params.kind.conditional.type = _SWITCH
        params.kind.conditional.size = count
        params.kind.conditional.ctx = self.context()
        node = ctypes.c_void_p()
        dependencies, number = _dependencies(after)
        self.call(
            "cuGraphAddNode_v2",
            ctypes.byref(node),
            ctypes.c_void_p(graph),
            dependencies,
            None,
            number,
            ctypes.byref(params),
        )
        found = ctypes.cast(params.kind.conditional.phGraph_out, ctypes.POINTER(ctypes.c_void_p))
        return [int(found[index]) for index in range(count)]

    # ------------------------------------------------------------------ looking

    def nodes(self, graph: int) -> list[tuple[int, str]]:
        """Node and kind of every node of the graph itself."""
        number = ctypes.c_size_t()
        self.call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(number))
        nodes = (ctypes.c_void_p * number.value)()
        if number.value:
            self.call("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(number))
        found = []
        for node in nodes:
            kind = ctypes.c_int()
            self.call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
            found.append((int(node), NODE_KINDS.get(kind.value, f"kind {kind.value}")))
        return found

    def count_nodes(self, graph: int) -> dict[str, int]:
        """Nodes by kind, with those of child graphs in place of the child graph nodes."""
        counts: dict[str, int] = {}
        for node, kind in self.nodes(graph):
            inner = {kind: 1}
            if kind == "graph":
                child = ctypes.c_void_p()
                self.call(
                    "cuGraphChildGraphNodeGetGraph", ctypes.c_void_p(node), ctypes.byref(child)
                )
                inner = self.count_nodes(_value(child))
            for name, number in inner.items():
                counts[name] = counts.get(name, 0) + number
        return counts

    # ------------------------------------------------------------------ running

    def instantiate(self, graph: int) -> int:
        """An executable graph. A graph with a conditional node has at most one at a time."""
        executable = ctypes.c_void_p()
        self.call(
            "cuGraphInstantiateWithFlags",
            ctypes.byref(executable),
            ctypes.c_void_p(graph),
            ctypes.c_ulonglong(0),
        )
        return _value(executable)

    def upload(self, executable: int, stream: int) -> None:
        """Move an executable graph to the device, so that its first launch is like any other."""
        self.call("cuGraphUpload", ctypes.c_void_p(executable), ctypes.c_void_p(stream))

    def launch(self, executable: int, stream: int) -> None:
        """Launch without waiting."""
        self.call("cuGraphLaunch", ctypes.c_void_p(executable), ctypes.c_void_p(stream))

    def destroy(self, graph: int, executable: int) -> None:
        """Free a graph and its executable, which must not be running; errors are ignored."""
        # At the end of the process the context may be gone before its graphs.
        self._library.cuGraphExecDestroy(ctypes.c_void_p(executable))
        self._library.cuGraphDestroy(ctypes.c_void_p(graph))


@cache
def driver() -> Driver:
    """The machine's driver, opened once.

    Raises:
        EnvironmentMissing: see `Driver`.
    """
    return Driver()


def _dependencies(
    after: Sequence[int],
) -> tuple[ctypes.Array[ctypes.c_void_p] | None, ctypes.c_size_t]:
    array = (ctypes.c_void_p * len(after))(*after) if after else None
    return array, ctypes.c_size_t(len(after))


def _value(pointer: ctypes.c_void_p) -> int:
    assert pointer.value is not None, "the driver returned no handle and no error"
    return pointer.value
