"""Networks that take turns: each learns by a loss that reads the others as they are then."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from tests.foreign import program as _p
from tests.foreign.program import KEY, ROWS, Edit, Turns, normal

# -- CycleGAN after the paper, with fewer layers and without its pool of older images. Activations
# and distances are smooth, as rounding may cross a kink; and the gradient of a bias before a norm
# would be zero but for rounding.


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.silu(nn.InstanceNorm()(x))


class Generator(nn.Module):
    @nn.compact
    def __call__(self, x):
        around = lambda x, n: jnp.pad(x, ((0, 0), (n, n), (n, n), (0, 0)), mode="reflect")
        conv = lambda n, size, **options: nn.Conv(n, (size, size), use_bias=False, **options)
        valid = lambda n, size, x: conv(n, size, padding="VALID")(around(x, size // 2))
        x = Norm()(valid(8, 7, x))
        x = Norm()(conv(16, 3, strides=2)(x))
        y = Norm()(valid(16, 3, x))
        x += nn.InstanceNorm()(valid(16, 3, y))
        x = Norm()(nn.ConvTranspose(8, (3, 3), strides=(2, 2), use_bias=False)(x))
        return jnp.tanh(valid(3, 7, x))


class Critic(nn.Module):
    """Judges each patch of an image."""

    @nn.compact
    def __call__(self, x):
        x = nn.silu(nn.Conv(8, (4, 4), strides=2)(x))
        x = nn.Conv(16, (4, 4), strides=2, use_bias=False)(x)
        x = nn.silu(nn.InstanceNorm()(x))
        return nn.Conv(1, (4, 4))(x)


def cyclegan() -> Turns:
    generator, critic = Generator(), Critic()
    # Images of domain a, generated from b, and so on.
    images = lambda params, batch: {
        "a": generator.apply(params["a"], batch["b"]),
        "b": generator.apply(params["b"], batch["a"]),
    }
    distance = lambda x, y: optax.losses.log_cosh(x, y).mean()
    judged = lambda params, x, wanted: jnp.mean((critic.apply(params, x) - wanted) ** 2)

    def of_generators(params, batch, states):
        fake, critics = images(params, batch), states["critics"].params
        again, same = images(params, fake), {x: generator.apply(params[x], batch[x]) for x in "ab"}
        far = lambda x: 10 * distance(again[x], batch[x]) + 5 * distance(same[x], batch[x])
        of = lambda x: judged(critics[x], fake[x], 1.0) + far(x)
        return of("a") + of("b")

    def of_critics(params, batch, states):
        fake = images(states["generators"].params, batch)
        of = lambda x: judged(params[x], batch[x], 1.0) + judged(params[x], fake[x], 0.0)
        return (of("a") + of("b")) / 2

    batch = {x: np.tanh(normal(ROWS, 12, 12, 3)) for x in "ab"}

    def make(model, first):
        init = jax.jit(lambda key: model.init(key, batch["a"]))
        keys = {x: jax.random.key(first + i) for i, x in enumerate("ab")}
        return lambda: _p.state_of({x: init(key) for x, key in keys.items()}, extra=())

    makers = {"generators": make(generator, 0), "critics": make(critic, 2)}
    return Turns(makers, [("generators", of_generators), ("critics", of_critics)], batch)


# -- TD3 of rejax: two critics against their targets, an actor every second time

LOSSES: list[Edit] = [
    (f"        def {name}_loss_fn(params):\n", f"        def {name}_loss_fn(params, minibatch):\n")
    for name in ("critic", "actor")
]
LOSSES += [
    (
        f"        grads = jax.grad({name}_loss_fn)(ts.{name}_ts.params)\n"
        f"        ts = ts.replace({name}_ts=ts.{name}_ts.apply_gradients(grads=grads))\n"
        "        return ts\n",
        f"        return {name}_loss_fn\n",
    )
    for name in ("critic", "actor")
]
WITHOUT = _p.absent("distrax", "gymnax", "rejax.compat", "gymnax.environments")
WITHOUT |= _p.absent("gymnax.environments.environment")


@struct.dataclass
class Agent:
    """What the authors' updates read and replace."""

    actor_ts: Any
    critic_ts: Any
    actor_target_params: Any
    critic_target_params: Any
    rng: Any


def agent_of(states: Any) -> Agent:
    actor, critic = states["actor"], states["critic"]
    return Agent(actor, critic, actor.extra, critic.extra, KEY)


@jax.jit
def moved_targets(states: Any) -> Any:
    """After each round. Shards stay shards."""
    moved = lambda state: optax.incremental_update(state.params, state.extra, 0.01)
    return {name: state.replace(extra=moved(state)) for name, state in states.items()}


def td3() -> Turns:
    with _p.importable(WITHOUT):
        networks, algorithm = _p.library("rejax.networks"), _p.library("rejax.algos.td3")
        text = Path(algorithm.__file__).read_text()
        modules = _p.ported("td3", text, LOSSES)[:2]
    actor = networks.DeterministicPolicy(3, (-2.0, 2.0), (60, 60), nn.swish)
    critic = networks.QNetwork((60, 60), nn.swish)
    env = SimpleNamespace(action_space=lambda params: SimpleNamespace(low=-2.0, high=2.0))
    # Its noise is drawn, and scaled to zero: the devices' draws are not those of one device.
    options = {"actor": actor, "critic": critic, "target_noise": 0.0, "gamma": 0.9}
    options |= {"env": env, "env_params": None, "eval_callback": None}
    theirs, ours = (module.TD3(**options) for module in modules)
    batch = {"obs": normal(ROWS, 5), "next_obs": normal(ROWS, 5), "action": normal(ROWS, 3)}
    batch |= {"reward": normal(ROWS), "done": (normal(ROWS) > 1).astype(np.float32)}
    batch = _p.library("rejax.buffers").Minibatch(**batch)

    def of_critics(params, batch, states):
        return ours.update_critic(agent_of(states), None)(params, batch)

    def of_actor(params, batch, states):
        return ours.update_actor(agent_of(states), None)(params, batch)

    def step(name, states, batch):
        update = getattr(theirs, f"update_{name}")
        return getattr(update(agent_of(states), batch), f"{name}_ts")

    def make(init):
        params = jax.jit(init)(KEY)
        return lambda: _p.state_of(params, extra=jax.tree.map(lambda x: x / 2, params))

    pair = jax.vmap(critic.init, (0, None, None))
    makers = {
        "actor": make(lambda key: actor.init(key, batch.obs)),
        "critic": make(lambda key: pair(jax.random.split(key), batch.obs, batch.action)),
    }
    turns = [("critic", of_critics), ("critic", of_critics), ("actor", of_actor)]
    return Turns(makers, turns, batch, step, moved_targets)


PROGRAMS: dict[str, Callable[[], Turns]] = {"cyclegan": cyclegan, "td3": td3}
