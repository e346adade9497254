# The demonstration: one delayed choice between two pads, on two CPU cores.
tracemem demo --seed 0
tracemem demo --seed 1
tracemem report --add outputs/demo/seed-0 outputs/demo/seed-1 --to signal-next --decides "whether the demonstration shows what a memory is for"
