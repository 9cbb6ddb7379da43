"""Networks that take turns: each learns by a loss that reads the others as they are then.

TD3 of rejax has two critics against their targets, and an actor every second time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import struct

from tests.foreign import program as _p
from tests.foreign.program import KEY, ROWS, Edit, Turns, normal

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
