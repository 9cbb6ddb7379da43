"""Learns to swing up pendulums by PPO, as brax does it: environments are rows, on all devices.

    python examples/ppo.py                   # 8 emulated CPU devices, or your GPUs

`zerojax.reshard` brings the parameters whole to each device before a rollout, in which each device
plays its own environments. `zerojax.mean` normalizes the advantages over all devices. Means of
observations are a field of the state: `mutable=` passes them to the loss, and averages what it
returns over the devices. All numbers are one device's, but for rounding. With the defaults, the
mean reward rises from -6 to above -1.5, in half a minute of one CPU core.
"""

import argparse

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--envs", type=int, default=256, help="environments, over all devices")
parser.add_argument("--unroll", type=int, default=50, help="steps of each environment")
parser.add_argument("--minibatches", type=int, default=8, help="parts of the environments")
EPOCHS, EPISODE, DISCOUNT, LAMBDA, CLIP = 5, 200, 0.97, 0.95, 0.2


def reset(key):
    angle, speed = jax.random.uniform(key, (2,), minval=-1)
    return {"angle": jnp.pi * angle, "speed": speed, "age": jnp.zeros((), "int32")}


def observe(env):
    return jnp.stack([jnp.cos(env["angle"]), jnp.sin(env["angle"]), env["speed"]], -1)


def act(env, torque):  # returns the environment 0.05 seconds later, and the reward
    torque = jnp.clip(2 * torque, -2, 2)
    angle = (env["angle"] + jnp.pi) % (2 * jnp.pi) - jnp.pi
    reward = -(angle**2 + 0.1 * env["speed"] ** 2 + 0.001 * torque**2)
    speed = jnp.clip(env["speed"] + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
    return {"angle": angle + 0.05 * speed, "speed": speed, "age": env["age"] + 1}, reward


class Agent(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = lambda x: nn.tanh(nn.Dense(64)(x))
        mean, value = (nn.Dense(1)(layer(layer(x)))[..., 0] for _ in range(2))
        return mean, self.param("deviation", nn.initializers.constant(-0.5), ()), value


class PPOState(TrainState):
    stats: dict | None = None  # of observations


def normalized(x, stats):
    return (x - stats["mean"]) / jnp.sqrt(stats["square"] - stats["mean"] ** 2 + 1e-3)


def log_probability(action, mean, deviation):
    return -0.5 * ((action - mean) / jnp.exp(deviation)) ** 2 - deviation


def learner(args):
    """Returns functions that make the state, play, and train on a minibatch."""
    agent = Agent()

    def make_state():
        params = agent.init(jax.random.key(0), jnp.zeros((1, 3)))["params"]
        tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
        stats = {"count": jnp.ones(()), "mean": jnp.zeros(3), "square": jnp.ones(3)}
        return PPOState.create(apply_fn=None, params=params, tx=tx, stats=stats)

    def play(params, stats, env, key):
        """Returns environments after a rollout, and what each saw, did and got."""

        def move(env, key):
            of = lambda env: agent.apply({"params": params}, normalized(observe(env), stats))
            mean, deviation, value = of(env)
            action = mean + jnp.exp(deviation) * jax.random.normal(key, mean.shape)
            later, reward = act(env, action)
            error = 0.1 * reward + DISCOUNT * of(later)[2] - value
            logp, ends = log_probability(action, mean, deviation), later["age"] >= EPISODE
            starts = jax.vmap(reset)(jax.random.split(jax.random.fold_in(key, 1), len(ends)))
            new = jax.tree.map(lambda start, env: jnp.where(ends, start, env), starts, later)
            seen = {"seen": observe(env), "action": action, "logp": logp, "value": value}
            return new, {**seen, "reward": reward, "error": error, "ends": ends}

        def advantage(later, now):
            later = now["error"] + DISCOUNT * LAMBDA * jnp.where(now["ends"], 0, later)
            return later, later

        env, data = jax.lax.scan(move, env, jax.random.split(key, args.unroll))
        _, data["advantage"] = jax.lax.scan(advantage, 0 * data["value"][0], data, reverse=True)
        data["x"] = normalized(data["seen"], stats)
        return env, jax.tree.map(lambda x: x.swapaxes(0, 1), data)

    def loss_fn(params, batch, stats):
        mean, deviation, value = agent.apply({"params": params}, batch["x"])
        ratio = jnp.exp(log_probability(batch["action"], mean, deviation) - batch["logp"])
        gain = batch["advantage"] - zerojax.mean(batch["advantage"])
        gain = gain / (jnp.sqrt(zerojax.mean(gain**2)) + 1e-6)
        policy = -jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain).mean()
        seen, count = {"mean": batch["seen"], "square": batch["seen"] ** 2}, stats["count"] + 1
        new = {name: stats[name] + (seen[name].mean(0) - stats[name]) / count for name in seen}
        new["count"] = count  # an epoch counts observations again
        error = jnp.mean((value - batch["value"] - batch["advantage"]) ** 2)
        return policy + 0.5 * error - 0.001 * deviation, {"stats": new}

    return make_state, jax.jit(play), zerojax.train_step(loss_fn, mutable=("stats",))


def train(args, mesh=None):
    """Yields the state after each iteration, and its mean reward."""
    make_state, play, step = learner(args)
    state = zerojax.shard_train_state(make_state, stage=args.stage, mesh=mesh)
    env = jax.vmap(reset)(jax.random.split(jax.random.key(1), args.envs))
    env["age"] = np.arange(args.envs) % EPISODE  # so that they do not end together
    own = zerojax.run.process_slice(args.envs)
    env = zerojax.shard_batch(jax.tree.map(lambda x: np.asarray(x)[own], env), like=state)
    rows, order = env["age"].sharding, np.random.default_rng(0)
    pick = lambda data, at: jax.tree.map(lambda x: x[at].reshape(-1, *x.shape[2:]), data)
    pick = jax.jit(pick, out_shardings=rows)
    for n in range(args.iterations):
        env, data = play(zerojax.reshard(state), state.stats, env, jax.random.key(n))
        for _ in range(EPOCHS):
            for envs in np.split(order.permutation(args.envs), args.minibatches):
                # Emulated devices of few cores can starve each other with many programs at once.
                state, _ = jax.block_until_ready(step(state, pick(data, envs)))
        yield state, jax.block_until_ready(data["reward"].mean())  # beside no later program


def main():
    args = parser.parse_args()
    zerojax.initialize()
    for n, (_, reward) in enumerate(train(args), 1):
        if n % 10 == 1 or n == args.iterations:
            zerojax.run.log(f"iteration {n}: mean reward {reward:.2f}")


if __name__ == "__main__":
    main()
