"""Models of packages, as they are, with the losses that their authors train them by or the usual
ones, at sizes that compile soon. None knows of zerojax.

Some packages ask for CUDA, for old versions or for what reads data: `make foreign` installs these
without what they ask for, and a few of their imports are absent here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from tests.foreign import program as _p
from tests.foreign.program import KEY, ROWS, TX, Program, integers, normal, tokens


def stirred(params: Any) -> Any:
    """Adds noise: where layers start as zeros, two steps would leave most gradients zero."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(KEY, len(leaves))
    noise = lambda key, leaf: 0.05 * jax.random.normal(key, leaf.shape)
    return treedef.unflatten(x + noise(key, x) for key, x in zip(keys, leaves, strict=True))


# -- sequences


def rwkv() -> Program:
    """RWKV-7: a scan over stacked layers, and within each one over the tokens."""
    model = _p.library("jaxrwkv.rwkv7").ScanRWKV

    def loss(params, ids):
        start = model.default_state(params, None)
        logits, _ = jax.vmap(lambda row: model.forward(params, row, start))(ids)
        return _p.next_token_loss(logits, ids)

    def init():
        params, _ = model.randomize_weights(KEY, 2, 64, 100, None, jnp.float32)
        return stirred(params)

    return Program(lambda: _p.state_of(init()), loss, tokens(8, 100))


def s5() -> Program:
    """State spaces of complex numbers, by an associative scan. The package has its layers between
    Equinox's BatchNorm(mode="ema"), which does not run under `jax.shard_map`; here it is LayerNorm,
    the other one of the paper."""
    eqx, mixers = _p.library("equinox"), _p.library("discretax.sequence_mixers")
    glu = _p.library("discretax.channel_mixers").GLU

    class Block(eqx.Module):
        norm: Any
        mixer: Any
        gate: Any

        def __init__(self, key):
            self.norm = eqx.nn.LayerNorm(32)
            self.mixer = mixers.S5SequenceMixer(32, key, state_dim=16)
            self.gate = glu(32, key)

        def __call__(self, x):
            y = jax.nn.gelu(self.mixer(jax.vmap(self.norm)(x), KEY))
            return x + jax.vmap(self.gate)(y)

    class Model(eqx.Module):
        encoder: Any
        blocks: Any
        head: Any

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.encoder = eqx.nn.Linear(4, 32, key=keys[0])
            self.blocks = [Block(key) for key in keys[1:3]]
            self.head = eqx.nn.Linear(32, 5, key=keys[3])

        def __call__(self, x):
            x = jax.vmap(self.encoder)(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(axis=0))

    def loss(model, batch):
        logits = jax.vmap(model)(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    batch = {"x": normal(ROWS, 8, 4), "y": integers(5, ROWS)}
    return Program(lambda: zerojax.ModuleState.create(Model(KEY), TX), loss, batch)


# -- proteins and molecules


def proteins(residues: int, sequences: int) -> dict[str, Any]:
    """What AlphaFold's pipeline makes of a protein and its relatives; here random numbers."""
    shapes = {
        "target_feat": (residues, 22),
        "msa_feat": (sequences, residues, 49),
        "prev_pos": (residues, 37, 3),
        "prev_msa_first_row": (residues, 16),
        "prev_pair": (residues, residues, 12),
        "pseudo_beta": (residues, 3),
    }
    batch = {name: normal(ROWS, *shape) for name, shape in shapes.items()}
    batch["aatype"] = integers(20, ROWS, residues)
    batch["residue_index"] = np.tile(np.arange(residues), (ROWS, 1))
    for name in ("true_msa", "extra_msa"):
        batch[name] = integers(22, ROWS, sequences, residues)
    for name in ("seq_mask", "pseudo_beta_mask"):
        batch[name] = np.ones((ROWS, residues), np.float32)
    for name in ("msa_mask", "bert_mask", "extra_msa_mask"):
        batch[name] = np.ones((ROWS, sequences, residues), np.float32)
    for name in ("extra_has_deletion", "extra_deletion_value"):
        batch[name] = np.zeros((ROWS, sequences, residues), np.float32)
    return batch


def evoformer() -> Program:
    """AlphaFold's trunk, with the heads for masked sequences and for distances."""
    hk, modules = _p.library("haiku"), _p.library("alphafold.model.modules")
    config = _p.library("alphafold.model.config").model_config("model_3").model
    config.global_config.update(bfloat16=False, deterministic=True, use_remat=True)
    trunk = config.embeddings_and_evoformer
    trunk.update(evoformer_num_block=3, extra_msa_stack_num_block=1)
    trunk.update(msa_channel=16, pair_channel=12, extra_msa_channel=8, seq_channel=16)
    small = {"num_head": 2, "num_outer_channel": 4, "num_intermediate_channel": 4}
    for part in trunk.evoformer.values():
        part.update({name: size for name, size in small.items() if name in part})

    def forward(protein):
        heads = {"masked_msa": modules.MaskedMsaHead, "distogram": modules.DistogramHead}
        out = modules.EmbeddingsAndEvoformer(trunk, config.global_config)(protein, True)
        total = 0.0
        for name, head in heads.items():
            head = head(config.heads[name], config.global_config)
            loss = head.loss(head(out, protein, True), protein)["loss"]
            total += config.heads[name].weight * loss
        return total

    net, batch = hk.transform(forward), proteins(6, 3)
    one = jax.tree.map(lambda x: x[0], batch)
    init = jax.jit(lambda: stirred(net.init(KEY, one)))
    loss = lambda params, batch: jax.vmap(lambda p: net.apply(params, KEY, p))(batch).mean()
    # Its loop over the layers does not scan the stack, but takes a layer by the loop's counter.
    unmet = "all 3 layers of .* at once|for backward, all layers"
    return Program(lambda: _p.state_of(init()), loss, batch, unmet=unmet)


def nequip() -> Program:
    """The energies of molecules and their forces, a gradient by the positions. The loss is the
    authors' own, of one padded graph for each device."""
    jraph, precision = _p.library("jraph"), jax.config.jax_default_matmul_precision
    with _p.importable(_p.absent("wandb", "ase", "ase.io", "ase.neighborlist")):
        theirs = _p.library("nequip_eqx.train")
    jax.config.update("jax_default_matmul_precision", precision)  # which it has set for all

    def molecules():
        nodes = {"species": integers(3, 5), "positions": normal(5, 3), "forces": normal(5, 3)}
        graph = jraph.GraphsTuple(
            nodes=nodes, edges={}, n_node=np.array([3, 2]), n_edge=np.array([6, 2]),
            senders=np.array([0, 0, 1, 1, 2, 2, 3, 4]),
            receivers=np.array([1, 2, 0, 2, 0, 1, 4, 3]), globals={"energy": normal(2)},
        )  # fmt: skip
        return jraph.pad_with_graphs(graph, 8, 12, 3)

    batch = jax.tree.map(lambda *parts: np.stack(parts), *[molecules() for _ in range(8)])

    def loss(model, batch):
        return jax.vmap(lambda graphs: theirs.loss(model, graphs, 1.0, 1.0)[0])(batch).mean()

    def make():
        model = theirs.Nequip(
            KEY, n_species=3, lmax=1, hidden_size=8, n_layers=2, radial_mlp_size=16,
            radial_mlp_layers=1,
        )  # fmt: skip
        return zerojax.ModuleState.create(model, TX)

    return Program(make, loss, batch)


PROGRAMS = {each.__name__: each for each in (rwkv, s5, evoformer, nequip)}
