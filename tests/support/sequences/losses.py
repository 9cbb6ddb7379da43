"""What a loss makes of logits: shifts, sums over tokens, chunks, masks, preferences."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from tests.support.sequences import table as _t
from tests.support.sequences.table import (
    ATTENTION,
    DIM,
    ROWS,
    TOKENS,
    UNEVEN,
    VOCAB,
    Case,
    case,
    hidden_states,
)

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def ending(end, batch=None, **options):
    """A model whose last layer and batch go to `end(x, table, batch)`."""

    def loss(params, batch):
        ids = batch["ids"] if isinstance(batch, dict) else batch
        x = hidden_states(params, params["embed"][ids], _t.causal)
        return end(x, params["embed"], batch)

    batch = _t.tokens() if batch is None else batch
    return Case(_t.transformer_params(**ATTENTION), loss, batch, **options)


def ids_and(**others):
    return {"ids": _t.tokens(), "labels": _t.tokens(seed=1), **others}


@case("keys and values")
def labels_passed() -> Case:
    return ending(lambda x, w, b: cross_entropy(x @ w.T, b["labels"]).mean(), ids_and())


@case("keys and values")
def labels_rolled() -> Case:
    """To the left, the last of them masked."""

    def end(x, table, ids):
        losses = cross_entropy(x @ table.T, jnp.roll(ids, -1, axis=1))
        counts = jnp.arange(ids.shape[1]) < ids.shape[1] - 1
        return jnp.sum(losses * counts, 1).mean() / (ids.shape[1] - 1)

    return ending(end)


@case("keys and values")
def flat_labels() -> Case:
    """Of (rows * tokens, vocabulary), and indexed by `arange`."""

    def end(x, table, ids):
        logits = (x @ table.T)[:, :-1].reshape(-1, VOCAB)
        labels = ids[:, 1:].reshape(-1)
        return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels].mean()

    return ending(end)


@case("keys and values")
def flat_mean() -> Case:
    def end(x, table, batch):
        return cross_entropy(x.reshape(-1, DIM) @ table.T, batch["labels"].ravel()).mean()

    return ending(end, ids_and())


@case("keys and values")
def one_hot_labels() -> Case:
    def end(x, table, ids):
        labels = jax.nn.one_hot(ids[:, 1:], VOCAB) * 0.9 + 0.1 / VOCAB
        return optax.softmax_cross_entropy((x @ table.T)[:, :-1], labels).mean()

    return ending(end)


@case("keys and values")
def taken_along_axis() -> Case:
    """With the square of the log of the partition function, as PaLM has it."""

    def end(x, table, batch):
        logits = x @ table.T
        z = jax.nn.logsumexp(logits, -1)
        picked = jnp.take_along_axis(logits, batch["labels"][..., None], -1)[..., 0]
        return jnp.mean(z - picked) + 1e-2 * jnp.mean(z**2)

    return ending(end, ids_and())


@case("keys and values", UNEVEN)
def chunked_by_scan() -> Case:
    """A scan over chunks of each row, whose logits are made again in the backward pass."""

    def end(x, table, batch, chunks=4):
        cut = lambda a: jnp.moveaxis(a.reshape(len(a), chunks, -1, *a.shape[2:]), 1, 0)

        @jax.checkpoint
        def add(total, part):
            return total + cross_entropy(part[0] @ table.T, part[1]).sum(), None

        total, _ = jax.lax.scan(add, jnp.zeros(()), (cut(x), cut(batch["labels"])))
        return total / batch["labels"].size

    return ending(end, ids_and())


@case("keys and values")
def chunked_by_map() -> Case:
    """Over all shifted tokens, some at a time."""

    def end(x, table, ids):
        each = x[:, :-1].reshape(-1, DIM), ids[:, 1:].reshape(-1)
        one = jax.checkpoint(lambda token: cross_entropy(table @ token[0], token[1]))
        return jax.lax.map(one, each, batch_size=23).mean()

    return ending(end)


@case("keys and values")
def masked_mean() -> Case:
    def end(x, table, batch):
        losses = cross_entropy((x @ table.T)[:, :-1], batch["ids"][:, 1:])
        return zerojax.mean(losses, where=batch["mask"][:, 1:])

    mask = np.arange(TOKENS) < np.array([24, 3, 11, 1])[:, None]
    return ending(end, ids_and(mask=mask))


@case("keys and values")
def ignored_labels() -> Case:
    """Labels of -100 do not count, and each row has its own mean."""

    def end(x, table, batch):
        labels = batch["labels"]
        counts = labels != -100
        losses = cross_entropy(x @ table.T, jnp.where(counts, labels, 0)) * counts
        return jnp.mean(losses.sum(1) / jnp.maximum(counts.sum(1), 1))

    labels = np.where(np.arange(TOKENS) % 5 == 4, -100, _t.tokens(seed=1))
    labels[2] = -100
    return ending(end, ids_and(labels=labels))


@case("keys and values")
def losses_by_token() -> Case:
    """The aux has a loss and a hit for each token, and a number for each row."""

    def end(x, table, batch):
        logits = x @ table.T
        losses = cross_entropy(logits, batch["labels"])
        hits = logits.argmax(-1) == batch["labels"]
        aux = {"losses": losses, "hits": hits, "worst": losses.max(1), "scale": jnp.abs(x).mean()}
        return losses.mean(), aux

    return ending(end, ids_and(), has_aux=True)


@case("keys and values, the sum of each half")
def preferences() -> Case:
    """DPO of packed pairs: a row has a prompt with a chosen and a rejected answer, and the
    reference model's log-probabilities come with the batch."""

    def end(x, table, batch):
        logp = jax.nn.log_softmax(x[:, :-1] @ table.T)
        logp = jnp.take_along_axis(logp, batch["ids"][:, 1:, None], -1)[..., 0]
        part = batch["part"][:, 1:]
        chosen, rejected = (jnp.where(part == i, logp, 0).sum(1) for i in (1, 2))
        margin = (chosen - rejected) - (batch["chosen"] - batch["rejected"])
        return -jax.nn.log_sigmoid(0.1 * margin).mean(), {"margin": margin.mean()}

    part = np.digitize(np.arange(TOKENS), [7, 15]).astype(np.int32)
    reference = {"chosen": _t.normal(ROWS, seed=8), "rejected": _t.normal(ROWS, seed=9)}
    batch = {"ids": _t.tokens(), "part": np.tile(part, (ROWS, 1)), **reference}
    return ending(end, batch, has_aux=True)


@case("keys and values, sums of segments")
def segment_sums() -> Case:
    """The loss of each document of a packed row, which counts as much as every other."""

    def end(x, table, batch):
        losses = cross_entropy(x @ table.T, batch["labels"])
        sums = jax.vmap(lambda a, s: jax.ops.segment_sum(a, s, 3))
        total = sums(losses, batch["segments"])
        count = sums(jnp.ones_like(losses), batch["segments"])
        return jnp.mean((total / jnp.maximum(count, 1)).mean(1))

    segments = np.digitize(np.arange(TOKENS), [5, 16]).astype(np.int32)
    return ending(end, ids_and(segments=np.tile(segments, (ROWS, 1))))


@case("keys and values, returns")
def policy_gradient() -> Case:
    """PPO with advantages that are normalized over each row, clipped ratios, and a bonus for
    entropy; the log-probabilities of the old policy come with the batch."""

    def end(x, table, batch):
        logp_all = jax.nn.log_softmax(x @ table.T)
        logp = jnp.take_along_axis(logp_all, batch["labels"][..., None], -1)[..., 0]
        mask, adv = batch["mask"], batch["advantages"]
        of_row = lambda a: jnp.sum(a * mask, 1, keepdims=True) / mask.sum(1, keepdims=True)
        centred = adv - of_row(adv)
        adv = centred * jax.lax.rsqrt(of_row(centred**2) + 1e-6)
        ratio = jnp.exp(logp - batch["old"])
        gain = jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv)
        entropy = -jnp.sum(jnp.exp(logp_all) * logp_all, -1)
        return -of_row(gain + 0.01 * entropy).mean()

    mask = (np.arange(TOKENS) >= np.array([4, 9, 1, 20])[:, None]).astype(np.float32)
    shape = (ROWS, TOKENS)
    old = -3.6 + 0.1 * _t.normal(*shape, seed=5)
    return ending(end, ids_and(mask=mask, advantages=_t.normal(*shape, seed=4), old=old))


@case("keys and values, the last token that counts")
def reward_at_the_end() -> Case:
    """A reward model reads the last token of each row, at an index that comes with the batch."""

    def end(x, table, batch):
        last = jnp.take_along_axis(x, batch["last"][:, None, None], axis=1)[:, 0]
        return jnp.mean((last @ table[0] - batch["score"]) ** 2)

    last = np.array([23, 4, 12, 0], np.int32)
    return ending(end, {"ids": _t.tokens(), "last": last, "score": _t.normal(ROWS)})


@case("keys and values")
def contrastive() -> Case:
    """Rows are pooled and normed, and each token is told from the mean of its row."""

    def end(x, table, ids):
        pooled = x.mean(1)
        pooled = pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)
        scores = jnp.einsum("btd,bd->bt", x, pooled)
        return -jax.nn.log_softmax(scores, axis=1)[:, 0].mean()

    return ending(end)


@case("keys and values")
def derivative_in_the_loss() -> Case:
    """A penalty on the gradient with respect to the embedded tokens, of a layer of attention."""

    def loss(params, ids):
        def score(x):
            return _t.next_token_loss((x + _t.causal(params, x)) @ params["embed"].T, ids)

        value, slope = jax.value_and_grad(score)(params["embed"][ids])
        return value + jnp.mean(jnp.sum((slope * len(ids)) ** 2, (1, 2)))

    return Case(_t.weights(embed=(VOCAB, DIM), **ATTENTION), loss, _t.tokens(rows=2))
