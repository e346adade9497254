"""The battery's episodes: a small robot passes stations where a framed glyph shows for a few frames, wanders among stray
patches, and is asked at the end. `plan` draws what happens in a batch, `render` the pictures and states of a stretch of
it, so that any length fits in memory. An episode is a function of its batch's key: pieces of it are the same as the whole.
"""

import hashlib
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from trace_lab.questions import ASK, DWELL, KINDS, LATE, LEAD, TRAINED, TRAVEL, Condition, Task

SIZE = 8  # pixels
STRAY = 0.25  # chance that a frame's patch is coloured as a glyph is; else it is black
CHANNELS = 3  # of the robot's state: x, y, gripper
BLOCK = 64  # frames whose noise is drawn at once
NOISE = 0.2 / 256  # of a picture
ANGLES = (0.5, 2.2, 4.0, 5.2, 1.3, 3.1, 5.9, 4.6)  # of the stations on the unit circle, where they are always the same
BLACK, WHITE = KINDS, KINDS + 1  # numbers of colours, after those of the glyphs
COLOURS = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
JITTER = 0.05  # of a station
HOP = 8  # steps of a hop while wandering, about


class Plan(NamedTuple):
    """What happens in a batch of episodes, before anything is drawn."""

    key: tuple[int, ...]  # of all that is random
    kind: Int[Tensor, "B C"]  # of each station's glyph
    begin: Int[Tensor, "B C"]  # the step at which it is shown first
    dwell: int  # for so many steps
    points: Float[Tensor, "B P 2"]  # the way of the robot
    arrive: Float[Tensor, "B P"]  # when it is at each of them
    moving: Float[Tensor, "B P-1"]  # and how long it moves on from each, before it stands
    lift: Float[Tensor, "B 1 1"]  # of the gripper
    ask: int  # the step at which the question begins
    bar: Int[Tensor, " B"]  # height of the question's bar in pixels
    tint: Int[Tensor, " B"]  # its colour
    options: Int[Tensor, "B 4"] | None  # kind of the option in each quarter
    place: Int[Tensor, "B 4 2"]  # where in its quarter
    coloured: bool  # whether stray patches may be
    time: Float[Tensor, " F"]  # the time of each different frame, in steps
    shown: Int[Tensor, " T"]  # which frame is seen at each moment
    answer: Int[Tensor, " B"]

    @property
    def length(self) -> int:
        """Moments, T."""
        return len(self.shown)


class _Draws(NamedTuple):
    """All that is random in a stretch of frames; of a frame what it is does not depend on the stretch."""

    noise: UInt8[Tensor, "B F p"]
    stray: Int[Tensor, "B F"]  # colour of the patch
    patch: Int[Tensor, "B F 2"]  # its corner
    frame: Int[Tensor, "B F 2"]  # corner of the framed glyph
    shake: Float[Tensor, "B F 3"]  # of the state


def generator(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers of a key's own."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))


@cache
def _colours(device: torch.device) -> Tensor:
    return torch.tensor(COLOURS, device=device)


# -- what happens ----------------------------------------------------------------------------------------------------------


def plan(
    task: Task,
    episodes: int,
    *key: int,
    condition: Condition = TRAINED,
    device: torch.device | str = "cpu",
) -> Plan:
    """A batch of episodes.

    Args:
        task: what is asked.
        episodes: rows.
        key: seed, stream and number of the batch: the same numbers give the same episodes. In another condition the tour,
            the question and the answer stay what they are; only what the condition says is different.
        condition: how they are made longer or sampled.
        device: where they are drawn.

    Returns:
        The plan; `render` makes its pictures and states.
    """
    steps = task.steps + (condition.longer - 1) * task.delay
    frames = round(steps * condition.frames)
    back = torch.arange(
        frames - 1, -1, -1, dtype=torch.float64, device=device
    )  # the last frame is always the last step
    shown = torch.arange(frames, device=device)
    if condition.lose:
        shown = shown[back.long() % condition.lose != 1]
    when = {"ask": steps - ASK, "time": (steps - 1 - back / condition.frames).clamp_min(0)}
    when["shown"] = shown.repeat_interleave(condition.show)
    if task.maze:
        return _maze(task, episodes, key, device, when)
    return _tour(task, episodes, key, device, when, condition.longer)


def _tour(
    task: Task, rows: int, key: tuple[int, ...], device: torch.device | str, when: dict[str, Any], longer: int
) -> Plan:
    draw, cues = generator(*key, device=device), task.cues

    def uniform(*shape: int) -> Tensor:
        return torch.rand(rows, *shape, generator=draw, device=device)

    def whole(below: int, *shape: int) -> Tensor:
        return torch.randint(below, (rows, *shape), generator=draw, device=device)

    kind, asked = whole(KINDS, cues), whole(cues)
    answer, tint = kind.gather(1, asked[:, None])[:, 0], torch.full_like(asked, WHITE)
    bar = torch.zeros_like(asked) if task.question == "place" else asked + 1
    options = None
    if task.question == "count":  # each number as often, and each colour
        answer, tint, bar = whole(cues + 1), whole(KINDS), torch.full_like(asked, SIZE)
        other = (tint[:, None] + 1 + whole(KINDS - 1, cues)) % KINDS
        kind = torch.where(uniform(cues).argsort(1).argsort(1) < answer[:, None], tint[:, None], other)
    if task.question == "match":
        options = uniform(KINDS).argsort(1)
        answer = (options == answer[:, None]).long().argmax(1)

    # times: the tour begins late and each way is longer, by steps that are drawn; what is left is wandered afterwards
    lead, late = whole(LEAD + 1), whole(LATE + 1, cues)
    begin = lead[:, None] + (TRAVEL + late).cumsum(1) + DWELL * torch.arange(cues, device=device)
    rest = longer * task.delay - lead - late.sum(1)

    # places
    angle = torch.tensor(ANGLES[:cues], device=device)
    stations = torch.stack([angle.cos(), angle.sin()], -1).expand(rows, -1, -1)
    if task.question in ("order", "count"):
        stations = 2 * uniform(cues, 2) - 1
    back = stations.gather(1, asked[:, None, None].expand(-1, 1, 2)) if task.question == "place" else 0 * uniform(1, 2)
    before, stations = 2 * uniform(2, 2) - 1, stations + JITTER * (2 * uniform(cues, 2) - 1)
    last = back + JITTER * (2 * uniform(1, 2) - 1)
    lift, place = uniform(1, 1), whole(2, KINDS, 2)
    draw = generator(*key, longer, device=device)  # the wandering of a longer delay changes nothing of the tour
    hops = longer * task.delay // HOP
    share = 0.5 + uniform(hops + 1).double()
    rests = share / share.sum(1, keepdim=True) * rest[:, None]
    spans = torch.cat([lead[:, None], TRAVEL + late + DWELL, rests], 1)
    return Plan(
        **when,
        key=key,
        kind=kind,
        begin=begin,
        dwell=DWELL,
        points=torch.cat([before, stations, 2 * uniform(hops, 2) - 1, last], 1),
        arrive=torch.nn.functional.pad(spans.cumsum(1), (1, 0)),
        moving=torch.cat([lead[:, None], TRAVEL + late, rests], 1),
        lift=lift,
        bar=bar,
        tint=tint,
        options=options,
        place=place,
        coloured=True,
        answer=answer,
    )


def _maze(task: Task, rows: int, key: tuple[int, ...], device: torch.device | str, when: dict[str, Any]) -> Plan:
    """The cue is in the first frame; the robot's state tells nothing."""
    answer = torch.randint(task.classes, (rows,), generator=generator(*key, device=device), device=device)
    zero = torch.zeros(rows, dtype=torch.int64, device=device)
    arrive = torch.tensor([0.0, task.steps], dtype=torch.float64, device=device).repeat(rows, 1)
    return Plan(
        **when,
        key=key,
        kind=answer[:, None],
        begin=zero[:, None],
        dwell=1,
        points=torch.zeros(rows, 2, 2, device=device),
        arrive=arrive,
        moving=arrive[:, 1:],
        lift=torch.zeros(rows, 1, 1, device=device),
        bar=zero + SIZE,
        tint=zero + WHITE,
        options=None,
        place=zero[:, None, None].expand(-1, KINDS, 2),
        coloured=False,
        answer=answer,
    )


# -- what is seen ----------------------------------------------------------------------------------------------------------


def render(
    plan: Plan, begin: int = 0, end: int | None = None
) -> tuple[Float[Tensor, "B t 3 s s"], Float[Tensor, "B t 3"]]:
    """Pictures and states of the moments from `begin` to before `end`; of all, if not told."""
    shown = plan.shown[begin:end]
    draws = _draws(plan, shown)
    time = plan.time[shown]
    step = time.ceil().long()
    rows, moments = draws.stray.shape
    images = draws.noise.to(torch.float32).mul_(NOISE).view(rows * moments, 3, SIZE * SIZE)
    colours = _colours(images.device)
    frame = torch.arange(rows * moments, device=images.device).view(rows, moments)
    asking = step >= plan.ask

    seen = frame if plan.options is None else frame[:, ~asking]  # options lie on an empty ground
    _paint(images, seen, draws.patch.flatten(0, 1)[seen], colours[draws.stray.flatten()[seen]], 2)

    since = step - plan.begin[..., None]  # B C t
    row, station, moment = ((since >= 0) & (since < plan.dwell)).nonzero(as_tuple=True)
    at, corner = frame[row, moment], draws.frame[row, moment]
    _paint(images, at, corner, colours[WHITE].expand(len(at), 3), 4)
    _paint(images, at, corner + 1, colours[plan.kind[row, station]], 2)

    if bool(asking.any()):
        asked = frame[:, asking]
        if plan.options is not None:
            quarter = torch.tensor([[0, 0], [0, 4], [4, 0], [4, 4]], device=images.device)
            for number in range(KINDS):
                where, colour = quarter[number] + plan.place[:, number], colours[plan.options[:, number]]
                _paint(images, asked, _along(where, asked), _along(colour, asked), 2)
        column = images.view(rows, moments, 3, SIZE, SIZE)[:, :, :, :, -1]  # a view: B t 3 s
        bar = torch.arange(SIZE, device=images.device) >= SIZE - plan.bar[:, None]
        bar = (bar[:, None] & asking[:, None])[:, :, None]
        column.copy_(torch.where(bar, colours[plan.tint][:, None, :, None], column))
    return images.view(rows, moments, 3, SIZE, SIZE), _states(plan, time) + draws.shake


def _draws(plan: Plan, shown: Tensor) -> _Draws:
    """For these frames, taken from whole blocks, each with random numbers of its own."""
    first = int(shown[0]) // BLOCK
    blocks = [_block(plan, block) for block in range(first, int(shown[-1]) // BLOCK + 1)]
    parts = (torch.cat(each, 1) if len(each) > 1 else each[0] for each in zip(*blocks, strict=True))
    return _Draws(*(each.index_select(1, shown - first * BLOCK) for each in parts))


def _block(plan: Plan, block: int) -> _Draws:
    rows, device = len(plan.kind), plan.kind.device
    frames = min(BLOCK, len(plan.time) - block * BLOCK)
    draw = generator(*plan.key, len(plan.time), block, device=device)

    def whole(below: int, *shape: int) -> Tensor:
        return torch.randint(below, (rows, frames, *shape), generator=draw, device=device)

    words = torch.empty(rows, frames, 3 * SIZE * SIZE // 8, dtype=torch.int64, device=device)
    noise = words.random_(-(2**63), None, generator=draw).view(torch.uint8)  # eight pixels a number
    coloured = torch.rand(rows, frames, generator=draw, device=device) < STRAY
    stray = torch.where(coloured & plan.coloured, whole(KINDS), BLACK)
    shake = 0.01 * torch.randn(rows, frames, CHANNELS, generator=draw, device=device)
    return _Draws(noise, stray, whole(SIZE - 1, 2), whole(SIZE - 3, 2), shake)


def _states(plan: Plan, time: Tensor) -> Tensor:
    """Of the robot: from point to point at an even speed, then standing until it moves on."""
    rows, points = plan.arrive.shape
    hop = torch.searchsorted(plan.arrive, time.expand(rows, -1).contiguous(), right=True).sub_(1).clamp_(0, points - 2)
    phase = ((time - plan.arrive.gather(1, hop)) / plan.moving.gather(1, hop).clamp_min(1e-9)).clamp_(0, 1)
    phase, index = phase.float()[..., None], hop[..., None].expand(-1, -1, 2)
    xy = plan.points.gather(1, index) * (1 - phase) + plan.points.gather(1, index + 1) * phase
    return torch.cat([xy, torch.sin(2 * xy.sum(-1, keepdim=True) + plan.lift)], -1)


def _along(x: Tensor, frames: Tensor) -> Tensor:
    """A value a row (B, n) for each frame of that row (B, t)."""
    return x[:, None].expand(-1, frames.shape[1], -1)


def _paint(images: Tensor, frame: Tensor, corner: Tensor, colour: Tensor, size: int) -> None:
    """A square of a colour (..., 3), corner (..., 2), into each of these frames (...) of the images (N, 3, s * s)."""
    edge = torch.arange(size, device=images.device)
    pixel = (SIZE * (corner[..., 0, None, None] + edge[:, None]) + corner[..., 1, None, None] + edge).flatten(-2)
    images[frame[..., None], :, pixel] = colour[..., None, :]
