# The suite's table: five tasks, three trainings of each main method, one of each other. A list of commands, one a line;
# each can be stopped and goes on when called again. First see what it costs: add --plan-only.
tracemem compare --out outputs/suite --methods main --seeds 0 1 2
tracemem compare --out outputs/suite --methods main act+gru act+transformer act+lru act+retrieval ablations --seeds 0
tracemem report --add outputs/suite --to suite-next --decides "what tracemem train reaches by itself, with no label that only the suite has"
