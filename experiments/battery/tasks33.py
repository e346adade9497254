"""The battery of issue 33: a small robot passes stations where a framed glyph shows for a few frames, wanders among
unframed glyphs, and is asked at the end. All shapes are fixed and every draw happens on the device, so that a whole
training update can be one CUDA graph. Questions: sign, place, order, count, match (and place_anew, tmaze, and
variants _decoy, _loud with things that stand out as much as a cue). `plan` draws what happens, `render` the pictures of a stretch of it (so any length fits in memory).
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

KINDS, SIZE, STRAY = 4, 8, 0.25  # glyph colours; pixels; chance of an unframed coloured patch in a frame
TRAVEL, DWELL, ASK = 4, 4, 3  # steps between stations, at a station, and of the question
ANGLES = (0.5, 2.2, 4.0, 5.2, 1.3, 3.1, 5.9, 4.6)  # of the fixed stations on the unit circle
CONDITIONS = ("trained", "delay_8x", "delay_64x", "finer_8x", "coarser_4x", "dropped", "repeated")


class Plan(NamedTuple):
    """What happens in each row, before the pictures are drawn. T steps."""

    event: Tensor  # R T: kind of the framed glyph shown, -1 none, -2 a framed decoy (black inside), -3 ... -6 a loud one
    path: Tensor  # R T 3: state of the robot: x, y, gripper
    ask: Tensor  # T: whether the question is shown
    bar: Tensor  # R: height of the bar in pixels (0: none)
    bar_colour: Tensor  # R 3
    options: Tensor  # R 4: kind of the option in each quarter, -1: no options
    place: Tensor  # R 4 2: where in its quarter
    stray: float
    answer: Tensor  # R
    step: float  # seconds (steps of the original sampling) a frame


def classes(question: str, cues: int) -> int:
    return cues + 1 if question == "count" else 2 if question == "tmaze" else KINDS


@cache
def _constant(name: str, device) -> Tensor:
    """Kept, since a CUDA graph cannot copy from the host."""
    value = {"angles": ANGLES, "quarters": [[0, 0], [0, 4], [4, 0], [4, 4]], "colours": COLOURS}[name]
    return torch.tensor(value, device=device)


def _colours(device) -> Tensor:
    return _constant("colours", device)


COLOURS = ([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]])


def _randint(n: int, *shape: int, device) -> Tensor:
    return (torch.rand(*shape, device=device) * n).long().clamp(max=n - 1)


def plan(question: str, cues: int, rows: int, device, condition: str = "trained", pace: float = 1.0, delay: int = 64) -> Plan:
    """`pace` > 1 samples the same route more finely (fresh noise and patches in every frame), < 1 more coarsely."""
    decoys, loud = question.endswith("_decoy"), question.endswith("_loud")
    question = question.removesuffix("_decoy").removesuffix("_loud")
    if condition.startswith("delay_"):
        delay *= int(condition.removeprefix("delay_").removesuffix("x"))
    pace = {"finer_8x": 8.0, "coarser_4x": 0.25}.get(condition, pace)
    tour = cues * (TRAVEL + DWELL)
    length = tour + delay + ASK
    if question == "tmaze":  # the cue in the first frame, a corridor, the junction
        event = torch.full((rows, length), -1, device=device)
        answer = _randint(2, rows, device=device)
        event[:, 0] = answer
        path = torch.zeros(rows, length, 3, device=device)
        asked = torch.zeros(rows, dtype=torch.long, device=device)
        kind = event[:, :1]
    else:
        kind = _randint(KINDS, rows, cues, device=device)
        asked = _randint(cues, rows, device=device)
        if question == "count":  # how often the kind asked for is shown: 0 ... cues, each as often
            often = _randint(cues + 1, rows, device=device)
            wanted = _randint(KINDS, rows, device=device)
            rank = torch.rand(rows, cues, device=device).argsort(1).argsort(1)
            other = (wanted[:, None] + 1 + _randint(KINDS - 1, rows, cues, device=device)) % KINDS
            kind = torch.where(rank < often[:, None], wanted[:, None], other)
        angle = _constant("angles", device)[:cues]
        stations = torch.stack([angle.cos(), angle.sin()], -1).expand(rows, -1, -1)
        if question in ("order", "count"):
            stations = 2 * torch.rand(rows, cues, 2, device=device) - 1
        if question == "place_anew":  # a jittered 3 x 3 grid in random order: places anew, apart from each other
            cell = torch.rand(rows, 9, device=device).argsort(1)[:, :cues]
            stations = torch.stack([cell % 3 - 1.0, cell // 3 - 1.0], -1) * 0.8
            stations = stations + 0.3 * (torch.rand(rows, cues, 2, device=device) - 0.5)
        home = torch.zeros(rows, 1, 2, device=device)
        last = home
        if question in ("place", "place_anew"):
            last = stations.gather(1, asked[:, None, None].expand(-1, 1, 2))
        hops = max(delay // 8, 1)
        wander = 2 * torch.rand(rows, hops, 2, device=device) - 1
        points = torch.cat([home, stations, wander, last], 1)
        points = points + 0.1 * (torch.rand(points.shape, device=device) - 0.5)
        share = 0.5 + torch.rand(rows, hops + 1, device=device)
        rest = share / share.sum(1, keepdim=True) * delay
        spans = torch.cat([torch.full((rows, cues), float(TRAVEL + DWELL), device=device), rest], 1)
        arrive = torch.cat([torch.zeros(rows, 1, device=device), spans.cumsum(1)], 1)
        t = torch.arange(length, device=device, dtype=torch.float32).expand(rows, length).contiguous()
        hop = (torch.searchsorted(arrive, t, right=True) - 1).clamp(0, spans.shape[1] - 1)
        moving = torch.where(hop < cues, float(TRAVEL), spans.gather(1, hop))
        phase = ((t - arrive.gather(1, hop)) / moving).clamp(0, 1)[..., None]
        index = hop[..., None].expand(-1, -1, 2)
        xy = points.gather(1, index) * (1 - phase) + points.gather(1, index + 1) * phase
        grip = torch.sin(2 * xy.sum(-1, keepdim=True) + torch.rand(rows, 1, 1, device=device))
        path = torch.cat([xy, grip], -1)
        event = torch.full((rows, length), -1, device=device)
        steps = torch.arange(length, device=device)
        for cue in range(cues):
            begin = cue * (TRAVEL + DWELL) + TRAVEL
            event = torch.where((steps >= begin) & (steps < begin + DWELL), kind[:, cue : cue + 1], event)
        if decoys or loud:  # frames with nothing inside, or whole squares of a glyph's colour that stand out as much as a
            # cue: two steps each, anywhere but at a station or in the question
            on = torch.rand(rows, length // 2 + 1, device=device).repeat_interleave(2, 1)[:, :length] < 0.08
            decoy = -3 - _randint(KINDS, rows, length // 2 + 1, device=device).repeat_interleave(2, 1)[:, :length]
            decoy = decoy if loud else torch.full_like(decoy, -2)
            event = torch.where(on & (event == -1) & (steps < length - ASK), decoy, event)
        answer = kind.gather(1, asked[:, None])[:, 0]
        if question == "count":
            answer = (kind == wanted[:, None]).sum(1)
    # sampled in time: frame j shows source step floor, the path is interpolated
    frames = round(length * pace)
    back = torch.arange(frames - 1, -1, -1, device=device) / pace
    source = (length - 1 - back).clamp(0, length - 1)
    if condition == "dropped":
        source = source[(torch.arange(frames - 1, -1, -1, device=device) % 3) != 1]
    low = source.floor().long()
    high, part = (low + 1).clamp(max=length - 1), (source - low)[:, None]
    path = path[:, low] * (1 - part) + path[:, high] * part
    path = path + 0.01 * torch.randn(path.shape, device=device)
    ceil = (length - 1 - back.floor().long()).clamp(min=0)
    if condition == "dropped":
        ceil = source.long()
    event, ask = event[:, ceil], ceil >= length - ASK
    colours = _colours(device)
    bar, tint = torch.zeros(rows, dtype=torch.long, device=device), colours[5].expand(rows, 3)
    options = torch.full((rows, 4), -1, device=device)
    place = _randint(2, rows, 4, 2, device=device)
    if question in ("sign", "order", "match"):
        bar = asked + 1
    if question == "tmaze":
        bar = bar + SIZE
    if question == "count":
        bar, tint = bar + SIZE, colours[wanted]
    if question == "match":
        options = torch.rand(rows, 4, device=device).argsort(1)
        answer = (options == answer[:, None]).long().argmax(1)
    stray = 0.0 if question == "tmaze" else STRAY
    return Plan(event, path, ask, bar, tint, options, place, stray, answer, 1 / pace)


def render(p: Plan, begin: int = 0, end: int | None = None, repeat: int = 1) -> tuple[Tensor, Tensor]:
    """Pictures (R, t, 3, s, s) and path (R, t, 3) of steps begin ... end, each frame shown `repeat` times."""
    event, path, ask = p.event[:, begin:end], p.path[:, begin:end], p.ask[begin:end]
    device, (rows, steps) = event.device, event.shape
    colours = _colours(device)
    pixel = torch.arange(SIZE, device=device)

    def box(corner: Tensor, begin: int, size: int) -> Tensor:
        """... 2 -> ... s s: a square `begin` pixels beyond the corner."""
        inside = (pixel >= corner[..., None] + begin) & (pixel < corner[..., None] + begin + size)
        return inside[..., 0, :, None] & inside[..., 1, None, :]

    def paint(image: Tensor, where: Tensor, colour: Tensor) -> Tensor:
        return torch.where(where[..., None, :, :], colour[..., None, None], image)

    image = 0.2 * torch.rand(rows, steps, 3, SIZE, SIZE, device=device)
    coloured = torch.rand(rows, steps, device=device) < p.stray
    stray = torch.where(coloured, _randint(KINDS, rows, steps, device=device), 4)
    image = paint(image, box(_randint(SIZE - 1, rows, steps, 2, device=device), 0, 2), colours[stray])
    corner = _randint(SIZE - 3, rows, steps, 2, device=device)
    framed = (event != -1)[..., None, None]
    solid = (-3 - event).clamp(min=0)
    image = paint(image, box(corner, 0, 4) & framed, colours[torch.where(event <= -3, solid, 5)])
    image = paint(image, box(corner, 1, 2) & framed, colours[torch.where(event >= 0, event, torch.where(event <= -3, solid, 4))])
    asking = ask[None, :, None, None]
    quarter = _constant("quarters", device)
    wipe = (asking & (p.options[:, :1, None, None] >= 0)).expand(rows, steps, SIZE, SIZE)
    noise = 0.2 * torch.rand(rows, 1, 3, SIZE, SIZE, device=device)
    image = torch.where(wipe[:, :, None], noise, image)
    for o in range(4):
        where = box(quarter[o] + p.place[:, o], 0, 2)[:, None] & wipe
        image = paint(image, where, colours[p.options[:, o].clamp(min=0)][:, None].expand(rows, steps, 3))
    bar = (pixel[:, None] >= SIZE - p.bar[:, None, None]) & (pixel == SIZE - 1)  # R s s
    image = paint(image, bar[:, None] & asking, p.bar_colour[:, None].expand(rows, steps, 3))
    if repeat > 1:
        image, path = image.repeat_interleave(repeat, 1), path.repeat_interleave(repeat, 1)
    return image, path
