"""A cluster, a job and a dying node from Python. Each `# %%` begins a cell, as notebooks read it.

python examples/notebook.py
"""

# %% A cluster of three nodes. It ends with this program at the latest.
from contextlib import ExitStack
from pathlib import Path

import oobleck

HERE = Path(__file__).parent
running = ExitStack()  # what `with` does, across cells
cluster = running.enter_context(oobleck.local(nodes=3))
client = cluster.client
print(f"a master at {cluster.master}; nodes: {', '.join(cluster.nodes)}")

# %% A job: the tagger of tagger.py.
job = client.submit(HERE / "tagger.yaml", set=["training.steps=160", "profile=estimate"])

# %% Its losses while it trains. At step 10 a node dies.
losses = []
for record in client.metrics(job, follow=True):
    losses.append(record.loss)
    if record.step == 10:
        cluster.kill("n2")
    if record.step % 20 == 0:
        print(f"step {record.step:4}  loss {record.loss:.4f}  generation {record.generation}")

# %% What became of it.
for event in client.events(job):
    if event["event"] == "reconfigured":
        print(f"generation {event['to_generation']}: {event['cause']}, in {event['total_s']:.2f} s")
status = client.wait(job)
print(f"{status.state} at step {status.step}; loss {losses[0]:.4f} to {losses[-1]:.4f}")

# %% The end of the cluster.
running.close()
