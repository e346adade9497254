"""What is recorded: each case is a function of an `api` (how this version of the code is called) to tensors by name, "kind
what". Names of weights are the old ones, whatever they are called now.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from goldens import material
from goldens.material import ACTIONS, CAMERAS, CHANNELS, ENVIRONMENT, HEIGHT, LENGTHS, VELOCITIES, WIDTH, normal

Found = dict[str, Tensor]
F32, F64 = torch.float32, torch.float64
TOLERANCES = {F64: 1e-9, F32: 1e-5}
CASES: dict[str, tuple[Callable[[Any], Found], torch.dtype]] = {}
READ = ("slots", "z", "g", "dg", "alpha")
ROUTED = ("omega", "beta", "u")


def case(name: str, dtype: torch.dtype, what: Callable[..., Found], **options: Any) -> None:
    """Adds a case."""
    CASES[name] = (partial(what, dtype=dtype, **options), dtype)


# -- memories ----------------------------------------------------------------------------------------------------------

ROWS, STEPS, CONTENT = 3, 12, 32
PAPER = {"slots": 3, "depth": 2, "tau": 0.7, "identity": 0.3, "anchor": True}
MEMORIES: dict[str, dict[str, Any]] = {
    "trace": {"velocity_channels": VELOCITIES},
    "paper": {},
    "paper, options": {"name": "paper", "paper": PAPER},
    "paper, logsignature": {"name": "paper", "paper": {"log_signature": True}},
    **{name: {} for name in ("no-auxiliary", "unrouted", "no-delta", "mean-read", "signature-only", "current")},
    **{name: {} for name in ("gru", "transformer", "lru", "retrieval", "none")},
}


def said(readout: Any, kind: str) -> Found:
    """The fields of a readout."""
    found = {f"{kind} {name}": getattr(readout, name) for name in READ}
    if readout.routing is not None:
        found |= {f"{kind} {name}": getattr(readout.routing, name) for name in ROUTED}
    return found


def probed(readout: Any) -> Tensor:
    """A number that hangs on every field of a readout that carries gradient."""
    total = torch.zeros((), dtype=readout.z.dtype)
    for name in READ:
        x = getattr(readout, name)
        total = total + (x * normal(f"probe {name}", *x.shape).to(x)).sum()
    if readout.routing is not None:
        for name in ("omega", "u"):
            x = getattr(readout.routing, name)
            total = total + (x * normal(f"probe {name}", *x.shape).to(x)).sum()
    return total


def gradients(named: dict[str, Tensor]) -> Found:
    """Of all weights; nothing counts as zero."""
    weights = {n: x for n, x in named.items() if isinstance(x, torch.nn.Parameter)}
    return {f"gradient {n}": torch.zeros_like(x) if x.grad is None else x.grad for n, x in weights.items()}


def given(name: str, x: Tensor) -> Found:
    """The gradient of an input, if one reached it."""
    return {} if x.grad is None else {f"input {name}": x.grad}


def sequences(dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Contents, paths and which steps are valid."""
    contents = normal("contents", ROWS, STEPS, 2 * width).to(dtype)
    path = torch.stack([material.path(f"row {row}", STEPS) for row in range(ROWS)]).to(dtype)
    valid = torch.ones(ROWS, STEPS, dtype=torch.bool)
    valid[1, 8:], valid[2, 0], valid[2, 5] = False, False, False
    return contents, path, valid


def remembered(api: Any, *, dtype: torch.dtype, method: str, options: dict[str, Any]) -> Found:
    """One memory: steps with a row begun anew, a scan that goes on, the budget scan, and gradients of both."""
    width = CONTENT // 2
    options = {"name": method} | options
    memory = api.memory(channels=CHANNELS, content=CONTENT, width=width, hidden=24, **options).to(dtype).eval()
    named = api.named(memory)
    material.fill(named)
    found: Found = {f"weight {n}": x for n, x in named.items() if x.is_floating_point() and n != "_like"}
    contents, path, valid = sequences(dtype, width)
    state = memory.init(ROWS)
    with torch.no_grad():
        for t in range(10):
            if t == 4:
                state = memory.reset(state, torch.tensor([False, True, False]))
            state, readout = memory.step(state, contents[:, t], path[:, t])
            found |= {f"step{key}": x for key, x in said(readout, f" {t}").items()}
    found |= {f"state {name}": x for name, x in api.tensors(state).items()} | {"state steps": state.steps}
    contents.requires_grad_()
    if dtype == F64:
        after, readouts = memory.scan(contents, path, valid, state)
        found |= said(readouts, "on") | {f"after {n}": x for n, x in api.tensors(after).items()}
    after, readouts = memory.scan(contents, path, valid)
    found |= said(readouts, "scan") | {f"last {n}": x for n, x in api.tensors(after).items()}
    losses = api.auxiliary_losses(readouts, valid)
    found |= {f"loss {n}": x for n, x in losses.items()}
    probe = probed(readouts) + sum(losses.values())
    if probe.requires_grad:
        probe.backward()
        found |= gradients(named) | given("contents", contents)
    memory.zero_grad()
    contents = contents.detach()[:, :5].requires_grad_()
    at = torch.tensor([[0, 3, 5, 9, 11], [0, 2, 4, 6, 7], [0, 0, 1, 2, 3]])
    valid = torch.tensor([[True] * 5, [True, False, True, True, True], [False, False, True, True, True]])
    readouts = memory.scan_at(contents, path, at, valid)
    found |= said(readouts, "budget")
    if readouts.z.requires_grad:
        probed(readouts).backward()
        found |= {f"budget_{key}": x for key, x in gradients(named).items()}
    return found


def identity(api: Any, *, dtype: torch.dtype) -> Found:
    """What tells slots apart, as it is made; elsewhere it is filled like a weight."""
    del dtype
    memory = api.memory(name="trace", channels=CHANNELS, content=CONTENT, width=CONTENT // 2, hidden=24)
    return {"eta eta": api.named(memory)["slots.eta"]}


def statistics(api: Any, *, dtype: torch.dtype, method: str, period: int) -> Found:
    """What a policy's memory learns of a dataset's states."""
    options = {"name": method, "width": 24, "hidden": 16, "period": period}
    policy = small(api, "act", options).to(dtype)
    api.fit(policy, api.paths(*material.paths()))
    named = api.named(policy)
    wanted = ("content.mean", "content.std", "frames", "stride", "_mean", "_std", "normaliser.mask")
    return {
        f"{n.rpartition('.')[2]} {n}": x.double()
        for n, x in named.items()
        if n.startswith("recall.") and n.endswith(wanted)
    }


def counts(api: Any, *, dtype: torch.dtype) -> Found:
    """How many parameters a memory of the paper's size has, and of every other kind."""
    del dtype
    found = {}
    for method in ("trace", "paper", "no-delta", "transformer", "retrieval"):
        memory = api.memory(name=method, channels=17, content=1024, width=512, hidden=512)
        found[f"{method} count"] = torch.tensor(sum(p.numel() for p in memory.parameters()))
    return found


def adapters(api: Any, *, dtype: torch.dtype) -> Found:
    """What a policy gets of a readout."""
    width, token, slots = 16, 12, 4
    shapes = {"slots": (3, slots, width), "alpha": (3, slots)} | dict.fromkeys(("z", "g", "dg"), (3, width))
    fields = {name: normal(f"readout {name}", *shape).to(dtype).requires_grad_() for name, shape in shapes.items()}
    readout, features = api.readout(**fields), normal("features", 3, 7, token).to(dtype)
    made = {"tokens": lambda of: of(readout), "residual": lambda of: of(features, readout)}
    made |= {"condition": lambda of: of(readout), "modulation": lambda of: of(features[:, 0]).apply(features[:, 1])}
    found: Found = {}
    for name, make in api.adapters(width, token).items():
        adapter = make.to(dtype)
        named = api.named(adapter)
        material.fill(named, "" if name != "condition" else "map.")
        y = made[name](adapter)
        (y * normal(f"probe {name}", *y.shape).to(y)).sum().backward()
        grads = {n: x for n, x in gradients(named).items() if "columns" not in n}
        found |= {f"adapter {name}": y} | {f"{name}_{n}": x for n, x in grads.items()}
    return found | {f"input {n}": x.grad for n, x in fields.items()}


for _name, _options in MEMORIES.items():
    case(f"memory, {_name}", F64, remembered, method=_name, options=_options)
for _name in ("trace", "paper"):
    case(f"memory, {_name}, float32", F32, remembered, method=_name, options=MEMORIES[_name])
    for _period in (1, 3):
        case(f"statistics, {_name}, {_period}", F32, statistics, method=_name, period=_period)
case("statistics, gru", F32, statistics, method="gru", period=1)
case("slot identity", F32, identity)
case("parameters", F64, counts)
case("adapters", F64, adapters)

# -- policies ----------------------------------------------------------------------------------------------------------

TRACE = {"name": "trace", "width": 24, "hidden": 24, "velocity_channels": VELOCITIES, "dropout": 0.0}
PAPERS = TRACE | {"name": "paper", "velocity_channels": []}
ACT = {
    "dim_model": 32, "n_heads": 4, "dim_feedforward": 48, "n_encoder_layers": 1, "n_decoder_layers": 2,
    "n_vae_encoder_layers": 1, "latent_dim": 8, "chunk_size": 6, "n_action_steps": 4, "use_vae": False, "dropout": 0.0,
    "kl_weight": 0.3,
}  # fmt: skip
DIFFUSION = {
    "horizon": 8, "n_action_steps": 4, "down_dims": (16, 32), "crop_shape": None, "num_inference_steps": 2,
    "noise_scheduler_type": "DDIM", "use_separate_rgb_encoder_per_camera": False, "diffusion_step_embed_dim": 16,
    "spatial_softmax_num_keypoints": 4, "n_groups": 4, "do_mask_loss_for_padding": True, "kernel_size": 3,
}  # fmt: skip
CROPPED = {"use_separate_rgb_encoder_per_camera": True, "crop_shape": (44, 72)}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # stock policy, its options, the memory's
    "act": ("act", ACT, {}),
    "act, vae": ("act", ACT | {"use_vae": True}, {}),
    "act, residual": ("act", ACT, {"attach": "residual"}),
    "act, ensemble": ("act", ACT | {"temporal_ensemble_coeff": 0.01, "n_action_steps": 1}, {}),
    "diffusion": ("diffusion", DIFFUSION, {}),
    "diffusion, separate": ("diffusion", DIFFUSION | CROPPED, {}),
    "diffusion, crop": ("diffusion", DIFFUSION | {"crop_shape": (44, 72)}, {}),
    "diffusion, group norm": ("diffusion", DIFFUSION | {"use_group_norm": True, "crop_shape": (44, 72)}, {}),
}
PLAIN = ("act", "diffusion")
UNBATCHED = {"act": "act", "diffusion": "diffusion, group norm"}
MAIN = ("act", "act, vae", "act, residual", "diffusion", "diffusion, separate")


def small(
    api: Any, kind: str, memory: dict[str, Any] | None, *, environment: bool = False, attached: bool = False
) -> Any:
    """A small policy; without a memory for None."""
    stock, options, more = KINDS[kind]
    features = {"observation.state": (CHANNELS,), **dict.fromkeys(CAMERAS, (3, HEIGHT, WIDTH))}
    if environment:
        features["observation.environment_state"] = (ENVIRONMENT,)
    make = api.attached if attached else api.policy
    return make(stock, options, features, ACTIONS, None if memory is None else memory | more)


def ready(api: Any, kind: str, memory: dict[str, Any] | None, dtype: torch.dtype, **options: Any) -> Any:
    """The policy, with its weights given, on the episodes."""
    policy = small(api, kind, memory, **options).to(dtype)
    material.fill(api.named(policy))
    api.give_paths(policy, api.paths(*material.paths()))
    exact(policy, dtype)
    return policy.eval()


def exact(policy: Any, dtype: torch.dtype) -> None:
    """In float64: what LeRobot makes in float32 whatever the weights are is made in float64."""
    if dtype != F64:
        return
    for part in policy.modules():
        if hasattr(part, "encoder_latent_input_proj"):
            part.encoder_latent_input_proj.register_forward_pre_hook(lambda _, given: (given[0].double(),))
        if hasattr(part, "encoder_cam_feat_pos_embed"):
            part.encoder_cam_feat_pos_embed = material.Positions(part.encoder_cam_feat_pos_embed.dimension)
        if hasattr(part, "diffusion_step_encoder"):
            part.diffusion_step_encoder[0] = material.StepEmbedding(part.diffusion_step_encoder[0].dim)


def targets(policy: Any, dtype: torch.dtype, episodes: list[int], times: list[list[int]]) -> dict[str, Any]:
    """What an update is asked: frames of the episodes, (E, n). All of it in plain tensors."""
    states, starts, _ = material.paths()
    config, (count, each) = policy.config, (len(episodes), len(times[0]))
    begin = starts[torch.tensor(episodes)]
    period = config.memory.period if hasattr(config.memory, "period") else config.memory.update_every
    length = max(LENGTHS[episode] for episode in episodes)
    steps = torch.arange(-(-length // period)) * period
    last = torch.tensor([LENGTHS[episode] for episode in episodes])[:, None] - 1
    written, valid = begin[:, None] + steps.minimum(last), steps <= last
    wanted = torch.tensor(times)
    past = torch.arange(1 - config.n_obs_steps, 1)
    seen = (begin[:, None, None] + (wanted[..., None] + past).clamp_min(0)).flatten(0, 1)
    rows, where = torch.cat([written.flatten(), seen.flatten()]).unique(return_inverse=True)
    horizon = len(config.action_delta_indices)
    inputs = {"observation.state": torch.stack([normal(f"state {n}", CHANNELS) for n in seen.flatten().tolist()])}
    if config.env_state_feature is not None:
        inputs["observation.environment_state"] = torch.stack(
            [normal(f"env {n}", ENVIRONMENT) for n in seen.flatten().tolist()]
        )
    inputs = {n: x.unflatten(0, seen.shape) for n, x in inputs.items()}
    path = states[written]
    path[0] = states[written.flip(0)[0]]  # the first episode is addressed by another's path
    floats = {
        "states": states[rows],
        "path": path,
        "actions": normal("actions", count * each, horizon, ACTIONS),
        **{n: x[:, -1] if config.type.endswith("act") else x for n, x in inputs.items()},
    }
    return {
        "frames": [material.pictures(camera, *rows.tolist()).to(dtype) for camera in CAMERAS],
        "written": where[: written.numel()].view(written.shape),
        "seen": where[written.numel() :].view(seen.shape),
        "valid": valid,
        "row": torch.arange(count).repeat_interleave(each),
        "time": wanted.flatten() // period,
        "action_is_pad": torch.arange(horizon) >= horizon - 2 * (torch.arange(count * each) % 2)[:, None],
        **{n: x.to(dtype) for n, x in floats.items()},
    }


def learned(api: Any, policy: Any, loss: Tensor, logs: dict[str, Any]) -> Found:
    """A loss, what it is made of, and its gradients."""
    found = {"loss total": loss} | {f"log {n}": torch.as_tensor(x, dtype=F64) for n, x in (logs or {}).items()}
    if loss.dtype == F32:  # a rounding that moves one number past a ReLU's corner is more than a tolerance in gradients
        return found
    loss.backward()
    return found | gradients(api.named(policy))


def episodes(
    api: Any, *, dtype: torch.dtype, kind: str, memory: dict[str, Any] | None, frozen: bool = False, train: bool = True,
    environment: bool = False,
) -> Found:  # fmt: skip
    """An update on whole episodes; of a `frozen` encoder with its maps."""
    policy = ready(api, kind, memory, dtype, environment=environment)
    policy.train(train)
    asked = targets(policy, dtype, [1, 0], [[5, 9], [0, 8]])
    if frozen:
        with torch.no_grad():
            asked["frames"] = [x.detach() for x in api.encode(policy, asked["frames"])]
        for backbone in policy.backbones:
            backbone.requires_grad_(requires_grad=False)
    with material.drawn("update", dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return learned(api, policy, *api.update(policy, asked, frozen=frozen))


def budget(api: Any, *, dtype: torch.dtype, kind: str, memory: dict[str, Any], train: bool = True) -> Found:
    """An update on a batch of LeRobot's, in which each target brings its history: the paper's scan."""
    policy = ready(api, kind, memory | {"history_frames": 4, "history_stride": 2}, dtype)
    policy.train(train)
    batch = history(policy, dtype)
    with material.drawn("update", dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, logs = policy(batch)
    return learned(api, policy, loss, logs)


def history(policy: Any, dtype: torch.dtype) -> dict[str, Any]:
    """A batch as LeRobot's loader makes it for a policy with a memory."""
    states, starts, _ = material.paths()
    chosen = [(0, 0), (1, 3), (2, 11)]
    deltas = policy.config.observation_delta_indices
    at = [[int(starts[e]) + max(0, t + by) for by in deltas] for e, t in chosen]
    horizon = len(policy.config.action_delta_indices)
    batch: dict[str, Any] = {
        "observation.state": torch.stack([torch.stack([normal(f"state {n}", CHANNELS) for n in row]) for row in at]),
        "observation.raw_state": torch.stack([states[row] for row in at]),
        **{camera: torch.stack([material.pictures(camera, *row) for row in at]) for camera in CAMERAS},
        "action": normal("actions", len(chosen), horizon, ACTIONS),
    }
    batch = {n: x.to(dtype) for n, x in batch.items()}
    batch["action_is_pad"] = torch.arange(horizon) >= torch.tensor([horizon, horizon - 3, horizon])[:, None]
    batch["index"] = torch.tensor([int(starts[e]) + t for e, t in chosen])
    for name in ("observation.state", *CAMERAS):
        batch[f"{name}_is_pad"] = torch.tensor([[t + by < 0 for by in deltas] for _, t in chosen])
    return batch


def control(
    api: Any, *, dtype: torch.dtype, kind: str, memory: dict[str, Any] | None, compiled: bool = False,
    ways: Iterable[str] = ("select",), steps: int = 14, restart: bool = True, environment: bool = False,
) -> Found:  # fmt: skip
    """Two rows in control, the second of which begins anew after five steps and the first after nine."""
    policy = ready(api, kind, memory, dtype, environment=environment)
    return acted(api, policy, dtype, compiled=compiled, ways=list(ways), steps=steps, restart=restart)


def acted(
    api: Any, policy: Any, dtype: torch.dtype, *, compiled: bool = False, ways: list[str], steps: int, restart: bool
) -> Found:
    """Actions and memory states of a policy over some steps."""
    found: Found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if compiled:
            api.compile(policy, rows=2)
        policy.reset()
        clock = [-1, -1]
        for t in range(steps):
            clock = [0 if restart and t == begin else now + 1 for now, begin in zip(clock, (9, 5), strict=True)]
            rows = [(0 if t < 9 else 2, clock[0]), (1 if t < 5 else 0, clock[1])]
            batch = material.observation(rows, dtype, environment=policy.config.env_state_feature is not None)
            with material.drawn(f"step {t}", dtype):
                way = ways[t % len(ways)]
                if way == "observe":
                    policy.observe(batch)
                else:
                    call = policy.select_action if way == "select" else policy.predict_action_chunk
                    found[f"action {t}"] = call(batch)
            if not compiled and policy.readout is not None:
                found |= {f"readout_{name} {t}": getattr(policy.readout, name) for name in READ}
            for name, x in api.state(policy).items():
                found[f"state_{name} {t}"] = x
    return found


def attached(api: Any, *, dtype: torch.dtype, kind: str) -> Found:
    """A memory attached to a trained policy: on day zero it acts as the stock policy does; then it does not."""
    policy = small(api, kind, TRACE, attached=True).to(dtype).eval()
    named = api.named(policy)
    material.fill(named, "recall.memory.")
    material.fill(named, "recall.content.")
    options = {"ways": ["select"], "steps": 6, "restart": False}
    found = {f"zero_{n}": x for n, x in acted(api, policy, dtype, **options).items() if n.startswith("action")}
    material.fill(named, "recall.adapter.")
    return found | {f"later_{n}": x for n, x in acted(api, policy, dtype, **options).items()}


def saved(api: Any, *, dtype: torch.dtype, kind: str) -> Found:
    """Written to a folder and read from it, a policy acts as before."""
    policy = ready(api, kind, TRACE | {"period": 2}, dtype)
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(Path(folder))
        again = api.load(kind.partition(",")[0], Path(folder))
    return acted(api, again, dtype, ways=["select"], steps=5, restart=False)


for _kind in MAIN:
    _train = _kind != "diffusion, separate"  # LeRobot draws its crops in training
    case(f"{_kind}, trace, whole episodes", F64, episodes, kind=_kind, memory=TRACE, train=_train)
    case(f"{_kind}, trace, budget", F64, budget, kind=_kind, memory=TRACE, train=_train)
    case(f"{_kind}, trace, eager", F32, control, kind=_kind, memory=TRACE)
    case(f"{_kind}, trace, compiled", F32, control, kind=_kind, memory=TRACE, compiled=True)
for _kind in PLAIN:
    case(f"{_kind}, trace, eager, float64", F64, control, kind=_kind, memory=TRACE, steps=11)
    case(f"{_kind}, trace, whole episodes, float32", F32, episodes, kind=_kind, memory=TRACE)
    case(f"{_kind}, trace, frozen encoder", F64, episodes, kind=_kind, memory=TRACE, frozen=True)
    _third = TRACE | {"period": 3}
    case(f"{_kind}, period 3, whole episodes", F64, episodes, kind=_kind, memory=_third)
    case(f"{_kind}, period 3, eager", F32, control, kind=_kind, memory=_third)
    case(f"{_kind}, period 3, compiled", F32, control, kind=_kind, memory=_third, compiled=True)
    _mixed = ("select", "select", "observe", "predict", "select", "observe")
    case(f"{_kind}, all ways, eager", F32, control, kind=_kind, memory=TRACE, ways=_mixed)
    case(f"{_kind}, all ways, compiled", F32, control, kind=_kind, memory=TRACE, ways=_mixed, compiled=True)
    case(f"{_kind}, paper, whole episodes", F64, episodes, kind=_kind, memory=PAPERS)
    case(f"{_kind}, paper, budget", F64, budget, kind=_kind, memory=PAPERS)
    case(f"{_kind}, paper, eager", F32, control, kind=_kind, memory=PAPERS)
    case(f"{_kind}, paper, compiled", F32, control, kind=_kind, memory=PAPERS, compiled=True)
    # batch normalisations would notice how the pictures of targets are put together
    case(f"{_kind}, no memory, targets", F64, episodes, kind=UNBATCHED[_kind], memory=None, train=_kind == "act")
    case(f"{_kind}, no memory, frozen encoder", F64, episodes, kind=_kind, memory=None, frozen=True)
    case(f"{_kind}, no memory, eager", F32, control, kind=_kind, memory=None)
    case(f"{_kind}, no memory, compiled", F32, control, kind=_kind, memory=None, compiled=True)
    case(f"{_kind}, environment, whole episodes", F64, episodes, kind=_kind, memory=TRACE, environment=True)
    case(f"{_kind}, environment, eager", F32, control, kind=_kind, memory=TRACE, environment=True, steps=6)
    case(f"{_kind}, environment, compiled", F32, control, kind=_kind, memory=TRACE, environment=True, compiled=True)
    case(f"{_kind}, gru, whole episodes", F64, episodes, kind=_kind, memory=TRACE | {"name": "gru"})
    case(f"{_kind}, saved", F32, saved, kind=_kind)
for _kind in ("act, residual", "diffusion", "diffusion, separate"):
    case(f"{_kind}, attached", F32, attached, kind=_kind)
for _how in ("eager", "compiled"):
    _options = {"memory": TRACE, "compiled": _how == "compiled", "steps": 6}
    case(f"act, ensemble, {_how}", F32, control, kind="act, ensemble", restart=False, **_options)
    for _kind in ("diffusion, crop", "diffusion, group norm"):
        case(f"{_kind}, {_how}", F32, control, kind=_kind, **_options)
case("diffusion, group norm, whole episodes", F64, episodes, kind="diffusion, group norm", memory=TRACE, train=False)
