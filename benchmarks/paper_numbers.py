"""The ZeRO paper's numbers, from arXiv 1910.02054 v3, with the shapes and batches of its appendix.

Figures have arXiv's numbers. Numbers `READ_OFF` a chart are approximate: pairs of the lowest and
the highest value that they may have.
"""

# Figure 1: 7.5B parameters on 64 devices; stages 0 to 3 in GB.
FIGURE_1 = {0: 120, 1: 31.4, 2: 16.6, 3: 1.9}
# Table 1: parameters -> devices -> GB at stages 1, 2 and 3.
TABLE_1 = {
    7.5e9: {
        1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32),
        256: (518, 263, 8), 1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000),
        64: (4187, 2218, 250), 256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6),
    },
}  # fmt: skip
CELLS = [
    (params, devices, stage, row[stage - 1])
    for params, rows in TABLE_1.items()
    for devices, row in rows.items()
    for stage in (1, 2, 3)
]

# Table 2: degree of model parallelism -> billions of parameters by stage, on 64 GPUs per degree.
THEORY = {
    1: (2, 7.6, 14.4, 128),
    2: (4, 15.2, 28.8, 256),
    4: (8, 30.4, 57.6, 500),
    8: (16, 60.8, 115.2, 1000),
    16: (32, 121.6, 230.4, 2000),
}
MEASURED = {1: (1.3, 6.2), 2: (2.5, 12.5), 4: (5, 25), 8: (10, 50), 16: (20, 100)}

# Figure 2: on 400 GPUs, "over 38 TFLOP/s" from 8B to 100B; the largest has 170B.
FIGURE_2_TFLOPS = 38
# Figure 3: 60B on so many GPUs -> the batch of 16 GPUs; TFLOP/s of each GPU, READ_OFF.
FIGURE_3_BATCH = {64: 16, 128: 48, 256: 48, 400: 64}
FIGURE_3_READ_OFF = {64: (6, 6), 400: (36, 38)}
# Figure 4: on 128 GPUs without model parallelism -> the batch of a GPU; TFLOP/s, READ_OFF.
FIGURE_4_BATCH = {
    "1.5b": 24, "2.5b": 24, "4b": 16, "6b": 12, "8b": 8, "10b": 6, "11b": 4, "12b": 4, "13b": 2,
}  # fmt: skip
FIGURE_4_BASELINES = {"1.16b": 8, "1.38b": 1}
FIGURE_4_READ_OFF = dict.fromkeys(("1.5b", "2.5b", "4b", "6b", "8b"), (40, 47))
FIGURE_4_READ_OFF |= {"10b": (35, 35), "13b": (21, 21)}
FIGURE_4_READ_OFF |= dict.fromkeys(FIGURE_4_BASELINES, (0, 20))
# Figures 6 to 8, by configuration. All have C_B and M_D; with XLA, these are layers gathered one at
# a time, and static buffers. Figure 6: billions on 400 GPUs, 16 sequences for every 16 GPUs. Figure
# 8: the batch of 60B on 128 GPUs.
STAGES = {"C1": 1, "C2": 1, "C3": 2, "C4": 2, "C5": 2}
ACTIVATIONS = {
    "C1": None, "C2": "tensor", "C3": None, "C4": "tensor", "C5": ("host", "tensor"),
}  # fmt: skip
NAMES = {
    "C1": "P<sub>os</sub>",
    "C2": "P<sub>os</sub>, P<sub>a</sub>",
    "C3": "P<sub>os+g</sub>",
    "C4": "P<sub>os+g</sub>, P<sub>a</sub>",
    "C5": "P<sub>os+g</sub>, P<sub>a+cpu</sub>",
}
FIGURE_6 = {"C1": 40, "C2": 60, "C3": 50, "C4": 140, "C5": 150}
FIGURE_7_READ_OFF = {("40b", "C1"): (30, 30), ("40b", "C4"): (20, 20)}  # GB
FIGURE_8_BATCH = {"C1": 2, "C2": 4, "C3": 32, "C4": 32, "C5": 8}


def as_printed(gigabytes, printed, params):
    """Whether a number is the paper's. The paper rounds at 7.5B, and cuts off the digits in the
    columns of 128B and 1T (it prints 4187.5 as 4187)."""
    digits = len(str(printed).partition(".")[2])
    if params == 7.5e9:
        return abs(gigabytes - printed) <= 0.5 * 10**-digits + 1e-9
    return printed <= gigabytes + 1e-9 < printed + 10**-digits
