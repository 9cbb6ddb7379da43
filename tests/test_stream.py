"""Weights that leave: tensors one after another in bounded memory, and parameters resharded."""

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.support.collectives import collectives
from tests.support.families import FAMILIES
from tests.support.reference import assert_equal_bits, train_state
from zerojax._checkpoint import stream as _stream
from zerojax._plan import resharding as _resharding

DRAW = np.random.default_rng(0)


def normal(*shape):
    return DRAW.normal(size=shape).astype(np.float32)


# No number of devices divides a dimension of `head`; the layers of `experts` are sharded.
PARAMS = {
    "blocks": {"down": normal(4, 32, 24), "q": normal(4, 16, 24), "k": normal(4, 16, 24)},
    "experts": -np.abs(normal(8, 3, 5)) * (normal(8, 3, 5) > 0),  # with zeros of both signs
    "head": normal(257, 31),
    "ids": np.arange(8, dtype=np.int32),
}
BLOCK = {f"blocks/{name}": f"blocks.{{}}.{name}" for name in PARAMS["blocks"]}
NAMES = {  # as in files of another library: layer by layer, transposed, in one tensor
    "blocks/down": ("h.{}.down.weight", "out in -> in out"),
    "blocks/q": ("h.{}.qk", "in (0/2 out) -> in out"),
    "blocks/k": ("h.{}.qk", "in (1/2 out) -> in out"),
    "experts": "expert.{}",
}
THEIRS = {"head": PARAMS["head"], "ids": PARAMS["ids"]}
for n in range(4):
    of = {name: stack[n] for name, stack in PARAMS["blocks"].items()}
    THEIRS |= {f"h.{n}.down.weight": of["down"].T}
    THEIRS |= {f"h.{n}.qk": np.concatenate([of["q"], of["k"]], 1)}
THEIRS |= {f"expert.{n}": PARAMS["experts"][n] for n in range(8)}


@pytest.fixture
def programs(monkeypatch):
    """The kinds of gathers that run, and the most that each takes beside its arguments."""
    real, peaks = _stream._gathered, {}

    def gathered(values, indices, gather):
        if gather not in peaks:
            memory = real.lower(values, indices, gather).compile().memory_analysis()
            peaks[gather] = memory.output_size_in_bytes + memory.temp_size_in_bytes
        return real(values, indices, gather)

    monkeypatch.setattr(_stream, "_gathered", gathered)
    return peaks


def make_state():
    params = jax.tree.map(jnp.asarray, PARAMS)
    return train_state(params, optax.sgd(1e-2))


def placed(**options):
    return zerojax.shard_train_state(make_state, **{"stage": 3, **options})


LEVELS = zerojax.mesh(node=2, gpu=4)
TENSOR = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
IN_A_NODE = dict.fromkeys(("params", "grads", "opt_state"), "gpu")
ROWS = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "stage 3": {"overrides": {"experts": P("data")}},
    "groups": {"mesh": LEVELS, "groups": {"params": "gpu"}},
    "a node": {"mesh": LEVELS, "groups": IN_A_NODE},
    "host": {"offload": zerojax.Offload(opt_state=False, params=True, min_bytes=0)},
    "tensor": {"mesh": TENSOR, "overrides": {"down": P(None, "data", "tensor")}},
    "explicit": {"mesh": jax.make_mesh((8,), ("data",))},
}


@pytest.mark.parametrize("row", ROWS)
def test_full_tensors_come_under_other_names(row):
    """Layer by layer, whole on each device, without padding, bit for bit."""
    state, found = placed(**ROWS[row]), {}
    for name, tensor in zerojax.stream(state, names=NAMES):
        assert tensor.sharding.memory_kind != "pinned_host"
        assert tensor.sharding.mesh == state.params["head"].sharding.mesh
        shards = [np.asarray(shard.data) for shard in tensor.addressable_shards]
        assert len(shards) == 8 and all(x.tobytes() == shards[0].tobytes() for x in shards)
        found[name] = tensor
    jax.tree.map(lambda leaf: leaf.delete(), state.params)  # as a step that donates it
    assert found.keys() == THEIRS.keys()
    for name, tensor in found.items():
        assert np.asarray(tensor).tobytes() == THEIRS[name].tobytes(), name
    layers = [int(name.split(".")[1]) for name in found if name.startswith("h.")]
    assert layers == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("family", ["linen_partitioned", "haiku", "nnx"])
def test_trees_of_every_family_leave(family):
    """Under their paths, which export_safetensors gives them too."""
    if family == "nnx":
        model = nnx.Linear(31, 257, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
        wanted = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        wanted = {name: np.asarray(value) for name, value in wanted.items()}
        state = zerojax.nnx.state(*zerojax.nnx.shard(model, optimizer))
    else:
        one = FAMILIES[family]()
        leaves = jax.tree_util.tree_leaves_with_path(one.make().params)
        path = lambda keys: jax.tree_util.keystr(keys, simple=True, separator=".")
        wanted = {path(keys).replace("/", "."): value for keys, value in leaves}
        state = zerojax.shard_train_state(one.make, stage=3, mesh=one.mesh)
    found = dict(zerojax.stream(state))
    assert found.keys() == wanted.keys() and len(found) > 1
    assert_equal_bits(found, {name: wanted[name] for name in found})


def test_an_engine_takes_tensors_by_dlpack():
    """What vLLM's weight transfer takes: names, and tensors of one device in memory that is not
    copied and lasts as long as the engine wants. A file takes them too."""
    engine = {}
    for name, tensor in zerojax.stream(placed(), names=BLOCK):
        mine = tensor.addressable_data(0)
        engine[name] = np.from_dlpack(mine)
        assert engine[name].ctypes.data == mine.unsafe_buffer_pointer()
    del tensor, mine
    again = safetensors.numpy.load(safetensors.numpy.save(engine))
    assert_equal_bits(again, engine)
    assert_equal_bits(engine["blocks.3.down"], PARAMS["blocks"]["down"][3])


# -- what rests as codes

# Of 8 devices, one has only padding of each; `experts` are sharded along their layers.
FROZEN = {"up": normal(4, 33, 96), "down": normal(4, 41, 64), "experts": normal(8, 5, 64)}
PACKED = {
    "blocks": zerojax.quantize({name: FROZEN[name] for name in ("up", "down")}),
    "experts": zerojax.quantize(FROZEN["experts"], "int8"),
    "table": zerojax.quantize(normal(40, 32), "int4"),
    "head": normal(17, 8),
}
PACKED_NAMES = {
    "blocks/up": ("h.{}.up", "out in -> in out"),
    "blocks/down": ("h.{}.down", "(0/1 in) out -> in out"),
    "experts": "expert.{}",
}


def weights_under_names(dtype):
    weights = jax.tree.map(np.asarray, zerojax.manual.dequantize(PACKED))
    found = {name: weights[name] for name in ("head", "table")}
    found |= {f"h.{n}.up": weights["blocks"]["up"][n].T for n in range(4)}
    found |= {f"h.{n}.down": weights["blocks"]["down"][n] for n in range(4)}
    found |= {f"expert.{n}": weights["experts"][n] for n in range(8)}
    return {name: np.asarray(jnp.asarray(x, dtype)) for name, x in found.items()}


def packed_state(row):
    options = {"stage": 3, **ROWS[row]}
    plan = zerojax.plan({"params": PACKED}, **options)
    return plan.place({"params": PACKED}), plan


@pytest.mark.parametrize(("row", "dtype"), [("stage 3", "bfloat16"), ("host", "float32")])
def test_codes_leave_as_weights(row, dtype, programs):
    """Under the weights' names, decoded in the dtype asked for, and gathered as codes."""
    state, plan = packed_state(row)
    found = dict(zerojax.stream(state, names=PACKED_NAMES, dtype=dtype, plan=plan))
    wanted = weights_under_names(dtype)
    assert found.keys() == wanted.keys()
    assert_equal_bits(found, wanted)
    assert len(programs) == 5
    for gather, peak in programs.items():
        assert gather.nbytes < peak <= gather.most_bytes, gather


def test_codes_that_rest_whole_leave_as_weights():
    state, plan = packed_state("stage 0")
    streamed = dict(zerojax.stream(state, names=PACKED_NAMES, plan=plan))
    assert_equal_bits(streamed, weights_under_names("float32"))


def test_names_choose_between_codes_and_weights():
    state, plan = packed_state("stage 3")
    found = dict(zerojax.stream(state, names={"experts/int8": "bytes"}, plan=plan))
    assert_equal_bits(found["bytes"], np.asarray(PACKED["experts"].rows))
    assert found["blocks.up"].dtype == np.float32
    with pytest.raises(ValueError, match=r"counts all dimensions of table.*Leave out the {}"):
        zerojax.stream(state, names={"table": "{}.{}"}, plan=plan)


# -- memory


def live_bytes():
    """The bytes of all arrays on each device; of arrays that share memory, once."""
    found = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            found[shard.device, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    devices = jax.devices()
    return np.array([sum(n for (on, _), n in found.items() if on == d) for d in devices])


BIG = {"up": normal(6, 64, 128), "down": normal(6, 128, 64), "odd": normal(6, 8, 129)}
BIG_NAMES = {"up": ("h.{}.up", "out in -> in out"), "down": "h.{}.down", "odd": "h.{}.odd"}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("chunk", [None, 300_000])
def test_no_device_has_more_than_a_chunk_beside_its_state(dtype, chunk, programs):
    state, ahead = zerojax.shard_train_state({"params": BIG}, stage=3), []
    plan = zerojax.plan({"params": BIG}, stage=3)
    options = {"names": BIG_NAMES, "dtype": dtype, "plan": plan}
    least = 3 * 64 * 128 * (4 if dtype is None else 2) + 64 * 128 // 2 + 1024
    if chunk is None:
        with pytest.raises(ValueError, match=rf"takes {least} bytes to gather h.\d.down, beside h"):
            zerojax.stream(state, chunk_bytes=least - 1, **options)
    gc.collect()  # arrays of tests before, which would go during this one
    before = live_bytes()
    for name, tensor in zerojax.stream(state, chunk_bytes=chunk, **options):
        beside = live_bytes() - before  # with what is gathered ahead
        assert (beside <= (chunk or least)).all()
        ahead.append(beside.max() - tensor.nbytes)
        assert (live_bytes() - before >= tensor.nbytes).all(), name
    assert (max(ahead) > 100_000) if chunk else max(ahead) == 0
    assert len(programs) == 3
    for gather, peak in programs.items():
        assert gather.nbytes < peak <= gather.most_bytes, gather


GPU_NAMES = {  # torch's layout, heads rotated otherwise, one tensor of two, layers sharded
    "blocks/up": ("h.{}.up", "out in -> in out"),
    "blocks/q": ("h.{}.q", "(heads two dim) in -> in heads dim two"),
    "blocks/k": ("h.{}.kv", "(0/2 out) in -> in out"),
    "blocks/v": ("h.{}.kv", "(1/2 out) in -> in out"),
    "experts": "expert.{}",
}


def llama(row):
    """The shapes of Llama 3 8B on 8 H100s, and some that are harder."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    blocks = {"up": f32(32, 4096, 14336), "q": f32(32, 4096, 32, 64, 2)}
    blocks |= {"k": f32(32, 4096, 1024), "v": f32(32, 4096, 1024)}
    params = {"blocks": blocks, "embed": f32(128256, 4096), "odd": f32(4095, 4095)}
    params |= {"experts": f32(16, 1000, 1000)}
    options = {**ROWS[row], "mesh": zerojax.aot.mesh("8xH100"), "stage": 3}
    return zerojax.plan({"params": params}, **options)


def all_gathered(program):
    """The types of what all-gathers take and return."""
    return re.findall(r"= (.*?) all-gather(?:-start)?\(", program.as_text())


@pytest.mark.gpu_code
@pytest.mark.parametrize("row", ["stage 3", "host"])
def test_gathers_for_gpus_take_no_more_than_is_counted(row):
    """What travels is bfloat16. Of a stack in host memory, only the layer is on the device."""
    plan = llama(row)
    values, tensors = _stream.outgoing(plan.abstract(), GPU_NAMES, "bfloat16", None, "stream")
    for name in ("h.0.up", "h.0.q", "h.0.kv", "embed", "odd", "expert.0"):
        tensor = tensors[name]
        gather = _stream._gather_of(tensor, values)
        gathered = lambda *args, gather=gather: _stream._gathered(*args, gather)
        leaves = [values[one.leaf].value for one in tensor.parts]
        parts = leaves, [one.index for one in tensor.parts]
        whole = NamedSharding(plan.mesh, P())
        program = jax.jit(gathered, out_shardings=whole).lower(*parts).compile()
        memory = program.memory_analysis()
        assert memory.output_size_in_bytes >= gather.nbytes
        peak = memory.output_size_in_bytes + memory.temp_size_in_bytes
        assert peak <= gather.most_bytes, (name, peak, gather.most_bytes)
        moved = all_gathered(program)
        assert bool(moved) == (name != "expert.0"), "which one device has"
        assert all("u16" in types and "32[" not in types for types in moved), name


@pytest.mark.gpu_code
@pytest.mark.parametrize("row", ["stage 3", "host"])
def test_resharding_for_gpus_takes_one_leaf_beside_the_result(row, monkeypatch):
    plan, asked = llama(row), []
    real = _resharding._mover
    monkeypatch.setattr(
        _resharding, "_mover", lambda moves: lambda v: asked.extend((moves, v)) or v
    )
    zerojax.reshard(plan.abstract(), dtype="bfloat16", plan=plan)
    moves, values = asked
    whole = [NamedSharding(plan.mesh, P()) for _ in moves]
    move = jax.jit(lambda values: real(moves)(values), out_shardings=whole)
    memory = (program := move.lower(values).compile()).memory_analysis()
    sizes = [2 * leaf.nbytes // 4 for leaf in plan.params]
    assert sum(sizes) <= memory.output_size_in_bytes <= 1.001 * sum(sizes)
    assert memory.temp_size_in_bytes <= 1.2 * max(sizes)
    moved = all_gathered(program)
    assert moved and all("bf16" in types and "f32" not in types for types in moved)
    assert not any("S(5)" in types for types in moved), "in host memory"


def test_what_travels_has_the_dtype_that_is_asked_for():
    state = placed()
    for dtype, bits in ((None, "uint32"), ("bfloat16", "uint16")):
        values, tensors = _stream.outgoing(state, NAMES, dtype, None, "stream")
        tensor = tensors["h.0.qk"]
        gather = _stream._gather_of(tensor, values)
        leaves = [values[one.leaf].value for one in tensor.parts]
        parts = leaves, [one.index for one in tensor.parts]
        jaxpr = _stream._gathered.trace(*parts, gather).jaxpr
        sent = [(one.kind, one.dtype) for one in collectives(jaxpr)]
        assert sent == [("all-gather", bits)] * 2
    found = dict(zerojax.stream(state, names=NAMES, dtype="bfloat16"))
    assert found["ids"].dtype == np.int32
    wanted = {name: x.astype(jnp.bfloat16) for name, x in THEIRS.items() if name != "ids"}
    assert_equal_bits({name: found[name] for name in wanted}, wanted)


def test_layers_of_booleans_that_are_sharded():
    masks = np.arange(24).reshape(8, 3) % 2 == 0
    state = {"params": {"masks": masks}}
    state = zerojax.shard_train_state(state, stage=3, overrides={"masks": P("data")})
    found = dict(zerojax.stream(state, names={"masks": "mask.{}"}))
    assert_equal_bits(found, {f"mask.{n}": mask for n, mask in enumerate(masks)})
    assert {mask.dtype for mask in found.values()} == {np.dtype(bool)}


# -- resharded


RESHARDED = {
    "whole": ("stage 3", {}),
    "of the host": ("host", {"dtype": "bfloat16"}),
    "in a node": ("groups", {"over": "gpu", "overrides": {"head|ids": P()}}),
    "tensor": ("tensor", {"over": ("tensor",)}),
    "elsewhere": ("explicit", {"overrides": {"down": P(None, None, "data")}}),
    "below stage 3": ("stage 0", {}),
}
PLACES = {
    "in a node": {"blocks/down": P(None, "gpu"), "head": P(), "experts": P(None, None)},
    "tensor": {"blocks/down": P(None, None, "tensor"), "blocks/q": P()},
    "elsewhere": {"blocks/down": P(None, None, "data"), "blocks/q": P(), "head": P()},
}


@pytest.mark.parametrize("case", RESHARDED)
def test_resharded_parameters_are_where_they_were_asked_for(case, compiled):
    row, options = RESHARDED[case]
    state = placed(**ROWS[row])
    _resharding._mover.cache_clear()
    compiled.clear()
    params = zerojax.reshard(state, **options)
    assert compiled.count("jit(move)") == 1, compiled
    again = zerojax.reshard(state, **options)
    assert compiled.count("jit(move)") == 1, compiled
    jax.tree.map(lambda leaf: leaf.delete(), state.params)
    dtype = options.get("dtype", "float32")
    wanted = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == "float32" else x, PARAMS)
    assert_equal_bits(params, wanted)
    assert_equal_bits(again, wanted)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    found = {jax.tree_util.keystr(k, simple=True, separator="/"): x for k, x in leaves}
    for path, spec in PLACES.get(case, dict.fromkeys(found, P())).items():
        place = NamedSharding(found[path].sharding.mesh, spec)
        assert found[path].sharding.is_equivalent_to(place, found[path].ndim), path
        assert found[path].sharding.memory_kind != "pinned_host"


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(31, 257, rngs=rngs)
        self.norm = nnx.BatchNorm(257, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.inner(x)))


def test_a_second_nnx_model_samples_while_the_first_trains():
    """Padded variables, statistics and random streams do not change, or end, with the first."""
    model = Noisy(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    x = normal(8, 31)
    step = zerojax.nnx.train_step(lambda model, x: jnp.mean(model(x) ** 2))
    zerojax.nnx.shard(model, optimizer, stage=3)
    step(model, optimizer, x)
    state = zerojax.nnx.state(model, optimizer)
    sampler = zerojax.nnx.merge(state, zerojax.reshard(state))
    assert sampler.inner.kernel.get_raw_value().shape == (31, 257)
    assert sampler.inner.kernel.sharding.is_fully_replicated
    for each in (model, sampler):
        each.eval()
    wanted = np.asarray(model(x))
    model.train()
    step(model, optimizer, x)
    np.testing.assert_allclose(np.asarray(sampler(x)), wanted, rtol=1e-5, atol=1e-6)
    sampler.train()
    assert np.count_nonzero(sampler(x)) < x.shape[0] * 257  # its own dropout draws


# -- refusals

STATE = placed()
BARE = {"w": np.ones((8, 8), np.float32)}
ON_ONE = {"w": jnp.ones((8, 8))}
REFUSED = [
    (zerojax.stream, STATE, {"dtype": "int8"}, TypeError, r"int8'.*not a dtype of floats.*bfloat"),
    (zerojax.stream, STATE, {"chunk_bytes": 0}, ValueError, r"chunk_bytes=0 must be a positive"),
    (zerojax.stream, STATE, {"chunk_bytes": 4e3}, ValueError, r"gather head.*blocks.{}.up"),
    (zerojax.stream, STATE, {"names": {"x": "y"}}, ValueError, r"'x', which is not a parameter"),
    (zerojax.stream, STATE, {"plan": 3}, TypeError, "plan= takes a plan, got 3"),
    (zerojax.stream, {}, {}, ValueError, r"nothing to stream: you passed a dict"),
    (zerojax.stream, BARE, {}, TypeError, r"w is a ndarray, and zerojax.stream.*shard_train_state"),
    (zerojax.stream, ON_ONE, {}, TypeError, r"w is on no mesh, and zerojax.stream takes"),
    (zerojax.reshard, BARE, {}, TypeError, r"w is a ndarray, and zerojax.reshard takes"),
    (zerojax.reshard, {}, {}, ValueError, r"has no parameters"),
    (zerojax.reshard, STATE, {"dtype": "int8"}, TypeError, r"not a dtype of floats"),
    (zerojax.reshard, STATE, {"over": "gpu"}, ValueError, r"over='gpu'.*has \('data',\)"),
    (zerojax.reshard, STATE, {"over": 3}, ValueError, r"over=3 must name axes"),
    (zerojax.reshard, STATE, {"over": "data"}, ValueError, r"head \(shape \(257, 31\)\) cannot.*"
     r"8 does not divide dimension 0.*overrides=\{'head': jax.sharding.PartitionSpec\(\)\}"),
    (zerojax.reshard, STATE, {"overrides": {"nose": P()}}, ValueError, r"'nose', which matches"),
    (zerojax.reshard, STATE, {"overrides": {"q": P("x")}}, ValueError, r"blocks/q .*no axis 'x'"),
    (zerojax.reshard, STATE, {"overrides": {"q": P(*"abcd")}}, ValueError, r"no axis 'a'"),
    (zerojax.reshard, STATE, {"overrides": {"ids": P(None, None)}}, ValueError, r"fewer dimens"),
    (zerojax.reshard, STATE, {"overrides": {"q": 3}}, TypeError, r"blocks/q on 3; pass a"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "state", "options", "error", "remedy"), REFUSED)
def test_what_cannot_be_is_said_at_once(call, state, options, error, remedy):
    with pytest.raises(error, match=remedy):
        call(state, **options)


def test_a_state_that_was_trained_on_meanwhile_is_named():
    state = placed()
    tensors = zerojax.stream(state)
    next(tensors)
    jax.tree.map(lambda leaf: leaf.delete(), state.params)
    with pytest.raises(ValueError, match=r"state leaf .* is gone"):
        list(tensors)
    with pytest.raises(ValueError, match=r"is gone"):
        zerojax.reshard(state)
