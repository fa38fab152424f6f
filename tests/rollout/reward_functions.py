"""Reward functions for test_rewards.py; they run in the pool's processes."""

import os
import time


def behave(prompt, completion, prompt_ids, completion_ids, **row):
    if completion == "hang":
        while True:
            pass
    if completion == "sleep in C":
        time.sleep(10_000)
    if completion == "die":
        os._exit(3)
    if completion == "raise":
        raise RuntimeError("no reward for you")
    if completion == "text":
        return "not a number"
    if completion == "print":
        print("a line that must not reach the protocol", flush=True)
        os.write(1, b"nor this")
    if completion == "pid":
        return os.getpid()
    return len(completion_ids) + row.get("bonus", 0)


missing_import = None
