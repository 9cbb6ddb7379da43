"""The kernel: a step of ZeRO, stages 0 to 3, with no option. CONTRIBUTING has its reading order."""
