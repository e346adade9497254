"""The control step, made for speed (`policy.compile_for_control()`): a frozen copy of a policy whose every step is the same
few launches. All that a step reads or changes lies in buffers that never move; on a GPU a step is one CUDA graph, on a CPU
the same function is called. What a step computes is `MemoryPolicy.step`; the eager session is the reference.

A step is taken in as a whole or not at all: the device itself keeps the new state only if everything that came in and went
out is finite, and says so with the action, which is the only thing the host waits for.
"""

import copy
import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from lerobot_policy_trace.capture import replayed
from lerobot_policy_trace.encoder import baked
from lerobot_policy_trace.memory_head import exact_products
from lerobot_policy_trace.session import TIMESTAMP, Batch, Carry, Marks, Session, Turn
from trace_errors import ControlError
from trace_memory.memory import Readout
from trace_memory.trace import deployed

if TYPE_CHECKING:
    from lerobot_policy_trace.modeling_trace import MemoryPolicy

PRECISIONS = {
    "float32": "everything; what a CPU does if not told otherwise",
    "tf32": "GPU: the policy's convolutions and matrix products in TF32; what a GPU does if not told otherwise",
    "bf16": "the policy in bfloat16, the memory in float32",
    "fp16": "CPU: the memory's weights kept in float16, computed in float32",
}
COMPARED = 8  # observations on which another precision is compared with float32
TOLERANCE = 0.05  # of normalised actions: how far other precisions may be from float32
Program = Callable[[], None]


class CompiledSession(Session):
    """A session on a frozen copy of a policy."""

    fragile = True

    @classmethod
    def of(
        cls, policy: "MemoryPolicy", rows: int, *, precision: str | None, late: float | None, fuse: bool | None
    ) -> Self:
        """The session, when the options make sense and the precision is fine enough. Draws no random numbers."""
        device = next(policy.parameters()).device
        cuda = device.type == "cuda"
        precision = precision or ("tf32" if cuda else "float32")
        if rows < 1 or precision not in PRECISIONS or (late is not None and not late > 0):
            raise ControlError(
                f"rows, precision, late: got {rows}, {precision!r}, {late}; expected 1 or more, one of "
                f"{', '.join(PRECISIONS)}, and seconds or None"
            )
        if device.type == (wrong := {"tf32": "cpu", "fp16": "cuda"}.get(precision)):
            raise ControlError(f"precision: {precision!r} is not for {wrong}; {PRECISIONS[precision]}")
        if not policy.config.image_features:
            raise ControlError(
                "input_features: no pictures; a policy without cameras has nothing that compiling would speed up"
            )
        if policy.memory_head is not None and not int(policy.memory_head.frames):
            warnings.warn("the memory has no statistics yet: this policy was not trained", stacklevel=3)
        with torch.inference_mode(mode=False), torch.random.fork_rng([device] if cuda else []):
            made = cls(policy, rows, late, precision, fuse=cuda if fuse is None else fuse)
            if precision != "float32":
                made.error = compare(cls(policy, rows, None, "float32", fuse=False), made)
        return made

    def __init__(self, policy: "MemoryPolicy", rows: int, late: float | None, precision: str, *, fuse: bool):
        self.source, self.version, self.precision, self.fuse = policy, version(policy), precision, fuse
        self.programs: dict[tuple[bool, bool], Program] = {}
        copied, self.last = frozen(policy, precision)
        head, self.advance = copied.memory_head, None
        if head is not None:
            self.advance = self.fused(head.memory.advance)
            if fuse:
                head.register_module("adapter", self.fused(head.adapter))
        super().__init__(copied, rows, late)
        self.dtype = torch.float32
        self._make_buffers()
        for see, act in ((True, True), (self.remembers, False), (False, False)):
            self.programs[see, act] = self._program(see=see, act=act)
        self.reset()

    def fused(self, call: Any) -> Any:
        """A function whose small operations are joined into few kernels (torch.compile), if that was asked for."""
        if not self.fuse:
            return call
        # The option also joins products of a matrix and a vector with what follows.
        return torch.compile(call, dynamic=False, options={"coordinate_descent_tuning": True})

    def _make_buffers(self) -> None:
        """Everything that a step reads or changes."""
        rows, device, cuda = self.rows, self.device, self.device.type == "cuda"
        self.given = {key: torch.zeros(shape, device=device) for key, shape in self.shapes.items()}
        self._marks = torch.zeros(5, rows, dtype=torch.int64, pin_memory=cuda)
        self.marks = torch.zeros(5, rows, dtype=torch.int64, device=device)
        super().begin()
        blank, head = self._carry, self.policy.memory_head
        if head is not None:
            with torch.no_grad():
                content, raw = (
                    torch.zeros(rows, n, device=device) for n in (head.memory.content, head.memory.channels)
                )
                readout = head.memory.advance(head.memory.init(rows), content, raw)[1]
            blank = blank._replace(readout=readout.map(torch.zeros_like))
        self.names = list(blank.memory)
        parts = [*blank.memory.values(), *(blank.readout or ())[:5]]
        self.forms = [x.shape[1:] for x in parts]
        self.kept = torch.zeros(rows, sum(form.numel() for form in self.forms), device=device)  # all of these in one
        self._carry = blank._replace(memory={}, readout=None)
        self.next = torch.zeros(rows, blank.chunk.shape[-1], device=device)  # actions
        self.checked = [*self.given, "memory", "action"]
        self.verdict = torch.zeros(len(self.checked), device=device)
        self._verdict = torch.zeros(len(self.checked), pin_memory=cuda)
        self.predicted: Tensor | None = None

    # -- the step, as a function of the buffers --------------------------------------------------------------------------

    def _program(self, *, see: bool, act: bool) -> Program:
        def program() -> None:
            with torch.no_grad(), computing(self.device, self.precision):
                self._advance(see=see, act=act)

        if self.device.type != "cuda":
            return program
        with torch.cuda.device(self.device):
            return replayed(program)

    def _advance(self, *, see: bool, act: bool) -> None:
        """One step, from buffers to buffers."""
        self.marks.copy_(self._marks, non_blocking=True)
        fresh, due, want, position, taken = self.marks
        marks = Marks(fresh.bool(), due.bool(), want.bool(), position, taken)
        before = self._unpacked()
        after, predicted = self.policy.step(
            before, self.given, marks, see=see, act=act, encode=self.encode, advance=self.advance
        )
        chunk, kept = after.chunk, self.kept
        if see and self.remembers:
            kept = torch.cat([x.flatten(1) for x in (*after.memory.values(), *(after.readout or ())[:5])], dim=1)
        if predicted is not None:
            self.predicted = predicted
        action = chunk[torch.arange(self.rows, device=self.device), position]
        whole = [*self.given.values(), kept, chunk if predicted is None else predicted]
        size = [torch.linalg.vector_norm(x, float("inf")) if x.numel() else x.sum() for x in whole]
        self.verdict.copy_(torch.stack(size))
        good = torch.isfinite(self.verdict).all()
        pairs = [(self.kept, kept), (self._carry.chunk, chunk), (self.next, action)]
        for buffer, value in (*pairs, *((self._carry.past[key], x) for key, x in after.past.items())):
            if buffer is not value:
                torch.where(good, value, buffer, out=buffer)
        self._verdict.copy_(self.verdict, non_blocking=True)

    def _unpacked(self) -> Carry:
        """What is carried, in its parts."""
        if not self.remembers:
            return self._carry
        parts = self.kept.split([form.numel() for form in self.forms], dim=1)
        shaped = [part.unflatten(1, form) for part, form in zip(parts, self.forms, strict=True)]
        memory = dict(zip(self.names, shaped, strict=False))
        return self._carry._replace(memory=memory, readout=Readout(*shaped[len(self.names) :]))

    def encode(self, pictures: list[Tensor]) -> list[Tensor]:
        """Feature maps (R, s, C, h, w); all cameras at once where they share an encoder."""
        shape, count = pictures[0].shape[:2], len(pictures)
        flat = [each.flatten(0, 1) for each in pictures]
        if self.last:
            flat = [each.contiguous(memory_format=torch.channels_last) for each in flat]
        if len(self.policy.backbones) == 1 and len({each.shape for each in flat}) == 1:
            together = self.policy.encode_steps([torch.cat(flat)[:, None]] if count > 1 else [flat[0][:, None]])
            return [each.unflatten(0, shape).squeeze(2) for each in together[0].chunk(count)]
        return [x.squeeze(1).unflatten(0, shape) for x in self.policy.encode_steps([each[:, None] for each in flat])]

    # -- what the host does ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Rows that begin empty their buffers themselves; refuses to begin with weights that have changed."""
        if self.programs and version(self.source) != self.version:
            raise ControlError("the weights changed since compile_for_control: call it again, or policy.use_eager()")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def carried(self) -> Carry:
        """Views of the buffers."""
        return self._unpacked()

    def action(self, turn: Turn) -> Tensor:
        """The action that the step has put into its buffer."""
        return self.next.clone()

    def compute(self, batch: Batch, turn: Turn, *, act: bool, noise: Tensor | None) -> tuple[Tensor | None, list[str]]:
        """Hands the observation over, lets the device do the step, and waits for its word that all was well."""
        if noise is not None:
            raise ControlError("noise: not known to a compiled policy; policy.use_eager() first")
        program = self.programs[act or (self.remembers and any(turn.due)), act]
        self._marks.numpy()[:] = (turn.fresh, turn.due, turn.want, turn.position, turn.taken)
        given, cuda = [batch[key] for key in self.given], self.device.type == "cuda"
        if cuda:
            with torch.cuda.device(self.device):
                torch._foreach_copy_([*self.given.values()], given, non_blocking=True)
                program()
                torch.cuda.current_stream().synchronize()
        else:
            torch._foreach_copy_([*self.given.values()], given)
            program()
        bad = [name for name, x in zip(self.checked, self._verdict.tolist(), strict=True) if not math.isfinite(x)]
        return self.predicted if act else None, [name for name in bad if name in self.given] or bad


def compare(exact: CompiledSession, other: CompiledSession) -> float:
    """How far a precision is from float32, on noise pictures; refused if too far."""
    generator, error = torch.Generator().manual_seed(0), 0.0
    for number in range(COMPARED):
        batch = {key: torch.rand(x.shape, generator=generator).to(x) for key, x in other.given.items()}
        chunks = []
        for each in (exact, other):
            torch.manual_seed(number)
            chunks.append(each.predict(batch | {TIMESTAMP: time.time()}))
        error = max(error, float((chunks[0] - chunks[1]).abs().max()))
    other.reset()
    if error > TOLERANCE:
        raise ControlError(
            f"precision: {other.precision} actions differ from float32 ones by up to {error:.3g}, expected {TOLERANCE} at "
            "most (of normalised actions)"
        )
    return error


def version(policy: nn.Module) -> int:
    """A number that is another one after weights were changed in place or replaced (not after changes through `.data`)."""
    weights = (*policy.parameters(), *policy.buffers())
    return hash(tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in weights))


def frozen(policy: "MemoryPolicy", precision: str) -> tuple[Any, bool]:
    """A copy for deployment: no gradients, normalisations baked into convolutions, weights arranged once. And whether its
    convolutions want pictures channels last.
    """
    made: Any = copy.deepcopy(policy, {id(policy.paths): None} if policy.paths is not None else {})
    made.eval().requires_grad_(requires_grad=False)
    last = sum(baked(backbone) for backbone in made.backbones) > 0
    head = made.memory_head
    if head is not None:
        with exact_products():
            head.register_module("memory", deployed(head.memory))
    if precision == "fp16" and head is not None:
        halve(head)
    if precision == "bf16":
        mine = {id(x) for x in head.modules()} if head is not None else set()
        for module in made.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d) and id(module) not in mine:
                module.to(torch.bfloat16)
    gc.collect()
    return made, last


class HalfLinear(nn.Module):
    """A linear layer whose weights are kept in float16 (FBGEMM): half the bytes to read, which is what a step on a CPU waits
    for. Products and sums are float32.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__()
        bias = None if layer.bias is None else layer.bias.detach()
        self.packed = torch.ops.quantized.linear_prepack_fp16(layer.weight.detach().contiguous(), bias)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's map."""
        made: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return made


def halve(module: nn.Module) -> None:
    """Puts a `HalfLinear` in the place of every linear layer."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            module.register_module(name, HalfLinear(child))
        else:
            halve(child)


@contextmanager
def computing(device: torch.device, precision: str) -> Iterator[None]:
    """The number format of everything computed meanwhile."""
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        if device.type != "cuda":
            yield
            return
        tf32 = precision == "tf32"
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32), exact_products(exact=not tf32):
            yield
