"""What a run tells its user: every sink behind one object, silent on all ranks but one."""

import time
from pathlib import Path

from megarl.config.load import as_dict
from megarl.config.run import BaseExperimentConfig
from megarl.stats import trace
from megarl.stats.console import ConsoleReporter
from megarl.stats.eval_file import write_evaluation
from megarl.stats.evaluation import Evaluation
from megarl.stats.sinks import MetricsLogger


class RunReporter:
    """Rows to metrics.jsonl, TensorBoard and W&B, and a table to the terminal.

    Each evaluation is also a file, RUN/eval/version_N.json, and where the config asks for a time
    line, that is opened and ended here.

    The last line it prints is `eval reward 0.xx -> 0.yy in N steps (S s)`, from the first and
    the last evaluation.
    """

    def __init__(self, config: BaseExperimentConfig, run_dir: Path, *, enabled: bool) -> None:
        self.enabled = enabled
        self._config, self._run_dir = config, run_dir
        self._evaluations: list[float] = []
        self._console: ConsoleReporter | None = None
        self._steps_done = 0
        self._start_s = self._step_end_s = time.monotonic()

    def __enter__(self) -> "RunReporter":
        if self.enabled:
            config = self._config
            self._sink = MetricsLogger(
                self._run_dir,
                tensorboard=config.stats_logger.tensorboard,
                wandb=config.stats_logger.wandb,
                config=as_dict(config),
                experiment_name=config.experiment_name,
                trial_name=config.trial_name,
            )
            if config.stats_logger.trace:
                trace.start(self._run_dir / "trace.json")
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if not self.enabled:
            return
        if self._console is not None:
            self._console.close()
        self._sink.close()
        trace.stop()
        if kind is None and self._evaluations:
            seconds = time.monotonic() - self._start_s
            print(
                f"eval reward {self._evaluations[0]:.2f} -> {self._evaluations[-1]:.2f} "
                f"in {self._steps_done} steps ({seconds:.0f} s)",
                flush=True,
            )

    def start(self, total_steps: int, *, after: int = 0) -> None:
        """Begin to show steps.

        Args:
          after: the step that a run goes on after; rows of later steps, which are run again,
            leave metrics.jsonl.
        """
        if not self.enabled:
            return
        kept = self._sink.keep_until(after)
        self._evaluations = [row["eval/reward"] for row in kept if "eval/reward" in row]
        self._steps_done = after
        self._console = ConsoleReporter(total_steps)
        self._console.start()
        if after:
            self._console.message(f"going on after step {after}")
        trace.instant("start", trace.STEPS, after_step=after, total_steps=total_steps)
        self._step_end_s = time.monotonic()

    def step(self, step: int, stats: dict[str, float], pool_stats: dict[str, float]) -> None:
        """One training step; `version` is that of the weights it made."""
        if self._console is None:
            return
        self._steps_done = step
        row = {"step": step, "version": step, **stats}
        row |= {f"rollout/{name}": value for name, value in pool_stats.items()}
        self._sink.commit(step, row)
        self._console.step(row)
        started_s, self._step_end_s = self._step_end_s, time.monotonic()
        trace.span(f"step {step}", trace.STEPS, started_s, self._step_end_s, version=step)

    def evaluation(self, step: int, result: Evaluation | None) -> None:
        """`result` is rank 0's; nothing on the others."""
        if self._console is None or result is None:
            return
        self._evaluations.append(result.reward)
        row = {"step": step, "version": step, **result.metrics()}
        self._sink.commit(step, row)
        self._console.eval(row)
        dataset = self._config.valid_dataset
        if dataset is not None:
            path = self._run_dir / "eval" / f"version_{step}.json"
            write_evaluation(path, result, dataset=dataset, version=step)
        trace.instant("evaluation", trace.STEPS, version=step, reward=result.reward)
