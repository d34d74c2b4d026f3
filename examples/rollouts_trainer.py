"""A trainer of rollouts, in plain Python: it takes batches from `gpuinfer rollouts --listen` until there are no more.

    gpuinfer rollouts --env arithmetic --model tiny --groups 32 --batch-groups 4 --listen 127.0.0.1:9000
    python examples/rollouts_trainer.py http://127.0.0.1:9000

It learns nothing: where it says `train`, a real one computes a loss. Kill it at any moment and start it again; it is
given the batch that it had not said to be done.
"""

import json
import sys
import time
import urllib.error
import urllib.request

PATIENCE_S = 30.0


def ask(url, path, body):
    """The answer to a request; asked again while nobody listens there: the run may be about to start."""
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/rollouts/{path}", data, kind)) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 409 and body["done"] is not None:  # the run has begun anew, and does not know of it
                return ask(url, path, {"wait_s": body["wait_s"], "done": None})
            sys.exit(json.load(error)["error"]["message"])
        except (urllib.error.URLError, ConnectionError) as error:
            if time.monotonic() > end:
                sys.exit(f"nobody listens at {url} ({error}).")
            time.sleep(0.2)


def train(groups):
    """Where the learning would be. Its tokens are those that were drawn, with their log-probabilities beside them."""
    tokens = rewards = games = 0
    for group in groups:
        for game in group["games"]:
            games += 1
            for trajectory in game["trajectories"]:
                rewards += trajectory["reward"]
                tokens += sum(len(turn["completion_tokens"]) for turn in trajectory["turns"])
    return {"tokens": tokens, "reward": rewards / max(1, games)}


def main(url):
    done, told = None, {}  # what is trained on, and what came of it
    while True:
        batch = ask(url, "take", {"wait_s": 30, "done": done, **told})
        done, told = None, {}
        if batch["over"]:
            return
        if batch["batch"] is not None:
            metrics = train(batch["groups"])
            again = " again" if batch["again"] else ""
            print(
                f"batch {batch['batch']}{again}: {metrics['tokens']} tokens, reward {metrics['reward']:.2f}", flush=True
            )
            done, told = batch["batch"], {"version": batch["version"] + 1, "metrics": metrics}


if __name__ == "__main__":
    main(sys.argv[1])
