"""Job: what the user asks. Each field's metadata is its only documentation (docs/job.md, --help and errors use it)."""

from __future__ import annotations

from typing import Dict, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.jobfile.check import check
from drumbeat.jobfile.fields import origins_field
from drumbeat.jobfile.job_course import JobCourse
from drumbeat.jobfile.job_launch import JobLaunch
from drumbeat.jobfile.job_scheduler import JobScheduler
from drumbeat.jobfile.job_software import JobSoftware
from drumbeat.jobfile.yamlfile import load_file, load_text, shown_path


@dataclass(frozen=True)
class Job(JobSoftware, JobScheduler, JobCourse, JobLaunch):
    """Its keys are those of its four parts. Fields of the last part come first, in docs/job.md as well."""

    brings: Tuple[str, ...] = ()  # packages of drumbeat's own that the command runs; no key of a file
    origins: Dict[str, str] = origins_field()

    def where(self, path: str) -> str:
        """The beginning of a message about a value: `job.yaml:3: nodes`, `--nodes`, or its bare name."""
        return self.origins.get(path, path)

    def asks(self, path: str) -> str:
        """Who wants a value: the job's preset, or the job itself."""
        preset = self.preset is not None and self.where(path).startswith(preset_file(self.preset) + ":")
        return f"preset {self.preset}" if preset else "as the job asks"


def preset_file(name: str) -> str:
    """How messages name the file of a preset."""
    return f"presets/{name}.yaml"


def job_from_file(path: str) -> Job:
    return check(Job, load_file(path, "a job file"), shown_path(path), "the job")


def job_from_text(text: str, file: str = "job.yaml") -> Job:
    return check(Job, load_text(text, file, "a job file"), file, "the job")
