"""Reward functions for test_rewards.py, in the pool's processes or awaited."""

import asyncio
import os
import time

running = 0


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
    if completion == "nan":
        return float("nan")
    if completion == "print":
        print("a line that must not reach the protocol", flush=True)
        os.write(1, b"nor this")
    if completion == "variable":
        return row["name"] in os.environ
    if completion == "pid":
        return os.getpid()
    return len(completion_ids) + row.get("bonus", 0)


async def behave_async(prompt, completion, prompt_ids, completion_ids, **row):
    global running
    if completion == "sleep":
        await asyncio.sleep(10_000)
    if completion == "nap":
        await asyncio.sleep(0.5)
    if completion == "own timeout":
        raise TimeoutError
    if completion == "inf":
        return float("inf")
    if completion == "reject":
        return None
    if completion == "most":
        running += 1
        await asyncio.sleep(0.01)
        running -= 1
        return running + 1
    return behave(prompt, completion, prompt_ids, completion_ids, **row)


missing_import = None
