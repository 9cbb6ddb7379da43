"""Trains a small decoder by GRPO, and sends its weights to an engine in the calls of vLLM.

    python examples/grpo.py                  # 8 emulated CPU devices, or your GPUs
    python examples/grpo.py --beta 0.1 --epochs 4

Each prompt has several digits, and a completion earns the share of them that it repeats backwards.

- **Rollouts**: `zerojax.reshard` brings the weights whole to each device, where a `lax.scan` writes
  a group of completions for each of its prompts and sends nothing.
- **Advantages** are relative to the group of a prompt.
- **Step**: a clip of the ratio to the policy that wrote, and a penalty on the divergence from a
  reference, the policy's start. The reference is sharded as well, and has no optimizer state:
  `zerojax.eval_step` scores completions, and gathers it layer by layer.

With the defaults, the mean reward rises from 0.1 to above 0.9, in 20 seconds of one CPU core.

**An inference engine.** `Engine` makes the HTTP calls of vLLM 0.29's weight transfer, by which a
server (`VLLM_SERVER_DEV_MODE=1 vllm serve ... --weight-transfer-config '{"backend": "nccl"}'`)
takes new weights: once `/init_weight_transfer_engine`, and for each transfer `/pause`,
`/start_weight_update`, `/update_weights` with names, dtypes and shapes, `/finish_weight_update`,
`/resume`. No call has weights in it: the server's GPUs take each tensor from an NCCL broadcast by
rank 0, the trainer. `join(world_size)` joins that group, and returns `send(name, tensor)`. Both are
yours, because they need torch, vLLM and NVIDIA GPUs. What to broadcast is
`torch.from_dlpack(tensor.addressable_data(0))`. Tests run these calls against a server that checks
their order and contents, and takes the tensors from a queue. Nobody has run them against vLLM,
whose models have names of their own: see `names=` of `zerojax.stream`. Or have a `WeightSource`
yield the pairs of `zerojax.stream` to vLLM's client.
"""

import argparse
import concurrent.futures
import contextlib
import json
import urllib.request

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import jax.numpy as jnp
import numpy as np
import optax
import train_gpt
from flax.training.train_state import TrainState

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--prompts", type=int, default=32, help="per iteration, over all devices")
parser.add_argument("--group", type=int, default=16, help="completions of a prompt")
parser.add_argument("--epochs", type=int, default=2, help="steps on the same completions")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--dim", type=int, default=64, help="a multiple of 32")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--clip", type=float, default=0.2, help="the most that a ratio counts off 1")
parser.add_argument("--beta", type=float, default=0.01, help="how strongly the reference holds")

DIGITS, START = 4, 10  # of a prompt and of a completion; the token between them
TOKENS = 2 * DIGITS + 1

# ---- rollouts


def log_probabilities(model, params, texts):
    """Returns those of the tokens of each completion."""
    logits = model.apply({"params": params}, texts[:, :-1]).astype("float32")
    return -optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:])[:, DIGITS:]


def rewards(texts):
    return jnp.mean(texts[:, DIGITS + 1 :] == texts[:, :DIGITS][:, ::-1], axis=1)


def player(model, args):
    """Returns a function that writes and scores a group of completions for each prompt."""

    def play(params, prompts, key):
        texts = jnp.pad(jnp.repeat(prompts, args.group, axis=0), ((0, 0), (0, DIGITS + 1)))
        texts = texts.at[:, DIGITS].set(START)

        def write(texts, now):
            at, key = now
            logits = jnp.take(model.apply({"params": params}, texts), at - 1, axis=1)
            return texts.at[:, at].set(jax.random.categorical(key, logits)), None

        places = jnp.arange(DIGITS + 1, TOKENS)
        texts, _ = jax.lax.scan(write, texts, (places, jax.random.split(key, DIGITS)))
        earned = rewards(texts).reshape(-1, args.group)
        spread = earned.std(1, keepdims=True) + 1e-4
        advantages = (earned - earned.mean(1, keepdims=True)) / spread
        old = log_probabilities(model, params, texts)
        return {"text": texts, "old": old, "advantage": advantages.reshape(-1)}, earned.mean()

    return jax.jit(play)


# ---- the step


def grpo_loss(model, args):
    def loss_fn(params, batch):
        new = log_probabilities(model, params, batch["text"])
        ratio, gain = jnp.exp(new - batch["old"]), batch["advantage"][:, None]
        clipped = jnp.clip(ratio, 1 - args.clip, 1 + args.clip)
        behind = batch["reference"] - new
        divergence = jnp.exp(behind) - behind - 1  # an estimate that is never negative
        # All completions have one length. Of others, take zerojax.mean(..., where=mask).
        loss = jnp.mean(args.beta * divergence - jnp.minimum(ratio * gain, clipped * gain))
        return loss, {"divergence": divergence.mean()}

    return loss_fn


def train(args, mesh=None):
    """Yields the state after each iteration, its mean reward, and the metrics of its last step."""
    model = train_gpt.GPT(args.layers, args.dim, TOKENS, vocab=16)

    def make_params():
        return model.init(jax.random.key(0), jnp.zeros((1, TOKENS), "int32"))["params"]

    def make_state():
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(args.lr))
        return TrainState.create(apply_fn=None, params=make_params(), tx=tx)

    def score(params, texts):
        return 0.0, log_probabilities(model, params, texts)

    state = zerojax.shard_train_state(make_state, stage=args.stage, mesh=mesh)
    frozen = zerojax.plan(lambda: {"params": make_params()}, stage=args.stage, mesh=mesh)
    reference = frozen.place(lambda: {"params": make_params()})
    scored = zerojax.eval_step(score, plan=frozen)
    play, step = player(model, args), zerojax.train_step(grpo_loss(model, args))
    own, draw = zerojax.run.process_slice(args.prompts), np.random.default_rng(0)
    for n in range(args.iterations):
        prompts = draw.integers(10, size=(args.prompts, DIGITS), dtype=np.int32)[own]
        prompts = zerojax.shard_batch(prompts, like=state)
        batch, reward = play(zerojax.reshard(state), prompts, jax.random.key(n))
        batch["reference"] = scored(reference, batch["text"])["aux"]
        for _ in range(args.epochs):
            state, metrics = jax.block_until_ready(step(state, batch))
        yield state, reward, metrics


# ---- an inference engine


class Engine:
    """A vLLM server that takes weights. All processes update it; the first one makes the calls."""

    def __init__(self, url, join, address="127.0.0.1", port=29500):
        self.url, self.metadata = url, None
        self.speaks = jax.process_index() == 0
        size = 1 + (self.call("get_world_size", "GET")["world_size"] if self.speaks else 0)
        group = {"master_address": address, "master_port": port}
        info = {**group, "rank_offset": 1, "world_size": size}
        with self.meanwhile("init_weight_transfer_engine", {"init_info": info}):
            self.send = join(size) if self.speaks else lambda name, tensor: None

    def call(self, path, method="POST", body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)

    @contextlib.contextmanager
    def meanwhile(self, path, body):
        """Calls while the block runs: the server answers when both have met in NCCL."""
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self.call, path, body=body) if self.speaks else None
            yield
            if answer is not None:
                answer.result()

    def update(self, state, names, dtype="bfloat16"):
        """Has the engine go on with the weights of this state."""
        tensors = lambda: zerojax.stream(state, names=names, dtype=dtype)
        if self.metadata is None:  # once, at the price of another transfer within the trainer
            self.metadata = {"names": [], "dtype_names": [], "shapes": []}
            for name, tensor in tensors():
                each = name, str(tensor.dtype), tensor.shape
                for values, value in zip(self.metadata.values(), each, strict=True):
                    values.append(value)
        for path in ("pause", "start_weight_update") if self.speaks else ():
            self.call(path)
        with self.meanwhile("update_weights", {"update_info": self.metadata}):
            for name, tensor in tensors():
                self.send(name, tensor)
        for path in ("finish_weight_update", "resume") if self.speaks else ():
            self.call(path)


def engine_names(state):
    """Returns names under which the layers of a stack leave one by one."""
    leaves = jax.tree_util.tree_leaves_with_path(state.params["blocks"])
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {f"blocks/{path}": f"layers.{{}}.{path}".replace("/", ".") for path in paths}


def main():
    args = parser.parse_args()
    zerojax.initialize()
    for n, (_, reward, metrics) in enumerate(train(args), 1):
        if n % 10 == 1 or n == args.iterations:
            away = metrics["aux"]["divergence"]
            zerojax.run.log(f"iteration {n}: mean reward {reward:.3f}, divergence {away:.3f}")


if __name__ == "__main__":
    main()
