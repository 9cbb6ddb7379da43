"""MaxText's own step for the published rows of MaxText, with the published flags.

.venv/maxtext/bin/python benchmarks/published_maxtext.py    # set up as `rivals_maxtext.py` says

Schedules go to the archive of `published.py`, which compares them. Two things differ from the
published runs: JAX calls cuDNN's attention, not Transformer Engine, and XLA schedules by its model,
not by a profile of a first run.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import figures  # sets how jax starts
import published
import rivals_maxtext

import zerojax

REMATS = {
    published.SAVE_QKV: "save_qkv_proj",
    published.SAVE_ALL_BUT_WIDE: "save_dot_except_mlpwi",
    published.DOTS: "minimal_with_context",
}
NAMES = (
    *(f"MaxText Llama 2 70B, {count} H100" for count in (64, 1024)),
    *(f"MaxText Llama 3 70B, {count} H100" for count in (128, 256, 1024)),
    "MaxText Llama 2 7B, 8 H100",
    *(f"MaxText Llama 2 7B, {count} H100 of A3" for count in (8, 16, 128)),
)


def settings(row):
    """Returns MaxText's settings for a row, in place of the rivals'."""
    model, shard = row.model, row.shard or row.count
    return {
        "decoder_block": "llama2",
        "base_emb_dim": model.hidden,
        "base_num_query_heads": model.heads,
        "base_num_kv_heads": model.kv_heads,
        "head_dim": model.hidden // model.heads,
        "base_mlp_dim": model.inner,
        "base_num_decoder_layers": model.layers,
        "mlp_activations": "['silu','linear']",
        "vocab_size": model.vocab,
        "trainable_position_size": -1,
        "max_target_length": model.tokens,
        "fused_qkv": "false",
        "logits_via_embedding": "false",
        "logits_dot_in_fp32": "false",
        "scan_layers": str(row.scan).lower(),
        "attention": "cudnn_flash_jax",
        "per_device_batch_size": row.rows,
        "remat_policy": REMATS[row.remat],
        "compile_topology_num_slices": row.count // row.per_host,
        "ici_fsdp_parallelism": shard,
        "ici_data_parallelism": row.count // shard,
    }


def flags(row):
    """Returns XLA's options from the sources."""
    combined = zip(("all_gather", "all_reduce", "reduce_scatter"), row.combine, strict=True)
    thresholds = {f"xla_gpu_{kind}_combine_threshold_bytes": mib << 20 for kind, mib in combined}
    pipelined = {
        f"xla_gpu_enable_pipelined_{kind}": True
        for kind in ("all_gather", "all_reduce", "reduce_scatter")
    }
    others = {
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_triton_gemm": False,
    }
    return published.OPTIONS | thresholds | pipelined | others


def compiled(row):
    mesh = zerojax.aot.mesh(row.gpus)
    options = figures.compiler_options(tuple(flags(row).items()), mesh.devices.flat[0])
    return rivals_maxtext.train_step(mesh, options, **settings(row)).as_text()


if __name__ == "__main__":
    published.compile_missing(NAMES, compiled, published.by_maxtext)
