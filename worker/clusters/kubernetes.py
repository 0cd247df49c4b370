"""Pilots as pods of an indexed Job, by the official Kubernetes client.

Kubernetes restarts nothing: a failed pod fails its Job, whose other pods are terminated. They save
a checkpoint within their grace period, and the run is queued and placed again.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import yaml
from kubernetes import client, config
from urllib3.exceptions import HTTPError

from db.errors import Invalid
from db.settings import Settings
from worker.clusters import kubernetes_check
from worker.clusters.cluster_check import Finding
from worker.clusters.kubernetes_check import said
from worker.clusters.placement import Pilots, PilotStatus, PlacementRejected, installation

REQUEST_SECONDS = 30.0
LOG_BYTES = 64 * 1024
#: Limit for listed pods and events of a run.
MOST_LISTED = 1000
#: Time after which Kubernetes deletes a finished job.
RETENTION_SECONDS = 24 * 3600
#: Status codes of `place` that concern the request, not the cluster.
REJECTIONS = {400, 403, 404, 409, 422}
CONTAINER = "worker"
INSTALLATION, QUEUE = "halfstep/installation", "kueue.x-k8s.io/queue-name"
#: Container states that need no message.
STARTING = {"ContainerCreating", "PodInitializing"}


class Kubernetes:
    """The cluster of this process's pod, else that of KUBECONFIG."""

    name = "kubernetes"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._namespace = settings.kubernetes_namespace
        self._template = _template(settings)
        self._installation = installation(settings).removeprefix("halfstep ")
        self._api = _connect()
        self._batch, self._core = client.BatchV1Api(self._api), client.CoreV1Api(self._api)

    def place(self, pilots: Pilots) -> None:
        """Create a Job with one pod per node, unless it exists. Raises PlacementRejected."""
        with _translate_errors():
            job = self._job(pilots)
            if job is not None and not self._is_ours(job):
                text = f"the namespace {self._namespace} has a job {pilots.name} of another "
                raise PlacementRejected(f"{text}installation: give each of them its own")
            if job is not None and not _end(job):
                return
            if job is not None:  # of an earlier try
                self._delete(pilots)
            try:
                self._batch.create_namespaced_job(
                    self._namespace, self.manifest(pilots), _request_timeout=REQUEST_SECONDS
                )
            except client.ApiException as error:
                if error.status not in REJECTIONS:
                    raise
                raise PlacementRejected(said(error)) from error

    def poll(self, pilots: Pilots) -> PilotStatus:
        """Return the state of the Job, with the reason why its pods wait or failed."""
        with _translate_errors():
            job = self._find_own_job(pilots)
            if job is None:
                return PilotStatus("gone", "Kubernetes has no such job")
            pods = self._pods(job)
            failed = next(filter(None, map(_failure, pods)), "")
            if end := _end(job):
                why = failed or end.message or end.reason or end.type
                return PilotStatus("gone", f"Kubernetes job {pilots.name} ended: {why}")
            up = [pod for pod in pods if pod.status.phase in ("Running", "Succeeded")]
            if len(up) >= pilots.nodes:
                names = ", ".join(sorted({pod.spec.node_name or "" for pod in up}))
                return PilotStatus("running", f"Kubernetes job {pilots.name} on {names}")
            why = failed or self._obstacle(job, pods)
            return PilotStatus("waiting", f"Kubernetes job {pilots.name} waits: {why}")

    def cancel(self, pilots: Pilots) -> None:
        """Delete the Job; its pods get SIGTERM and their grace period."""
        with _translate_errors():
            if self._find_own_job(pilots) is not None:
                self._delete(pilots)

    def log(self, pilots: Pilots) -> str:
        """Return the end of its pods' output."""
        with _translate_errors():
            job = self._find_own_job(pilots)
            pods = [] if job is None else self._pods(job)
            return "".join(map(self._read_log, pods))[-LOG_BYTES:]

    def check(self) -> Iterator[Finding]:
        """Report unmet requirements of the cluster.

        Its nodes report theirs in the first run's log.
        """
        with _translate_errors():
            job = self.manifest(Pilots(0, 0, nodes=1, devices=1))
            yield from kubernetes_check.findings(self._api, self._settings, job)

    def manifest(self, pilots: Pilots) -> dict[str, Any]:
        """Return the Job's manifest: the pod template, completed for pilots."""
        settings = self._settings
        labels = {INSTALLATION: self._installation}
        if settings.kubernetes_queue:
            labels[QUEUE] = settings.kubernetes_queue
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": pilots.name, "labels": labels},
            "spec": {
                "completionMode": "Indexed",
                "parallelism": pilots.nodes,
                "completions": pilots.nodes,
                "backoffLimit": 0,
                "suspend": bool(settings.kubernetes_queue),  # until Kueue admits it
                "ttlSecondsAfterFinished": RETENTION_SECONDS,
                "template": self._pod(pilots),
            },
        }

    def _pod(self, pilots: Pilots) -> dict[str, Any]:
        settings = self._settings
        pod = deepcopy(self._template)
        spec = pod.setdefault("spec", {})
        spec["restartPolicy"] = "Never"
        spec["terminationGracePeriodSeconds"] = max(60, round(2 * settings.stop_grace_seconds))
        if settings.kubernetes_service_account:
            spec["serviceAccountName"] = settings.kubernetes_service_account
        containers = spec.setdefault("containers", [])
        worker = next(
            (container for container in containers if container.get("name") == CONTAINER), None
        )
        if worker is None:
            worker = {"name": CONTAINER}
            containers.append(worker)
        worker["image"] = settings.kubernetes_image
        worker["command"] = ["halfstep", "worker", "--only", str(pilots.run_id)]
        worker["env"] = [
            *worker.get("env", []),
            {"name": "HALFSTEP_STOP_GRACE_SECONDS", "value": f"{settings.stop_grace_seconds:g}"},
            {
                "name": "HALFSTEP_WORKER_NAME",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
            },
        ]
        if settings.kubernetes_secret:
            secret = {"secretRef": {"name": settings.kubernetes_secret}}
            worker["envFrom"] = [*worker.get("envFrom", []), secret]
        if settings.kubernetes_resource:
            limits = worker.setdefault("resources", {}).setdefault("limits", {})
            limits[settings.kubernetes_resource] = str(pilots.devices)
        return pod

    def _find_own_job(self, pilots: Pilots) -> Any:
        job = self._job(pilots)
        return job if job is not None and self._is_ours(job) else None

    def _job(self, pilots: Pilots) -> Any:
        try:
            return self._batch.read_namespaced_job(
                pilots.name, self._namespace, _request_timeout=REQUEST_SECONDS
            )
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def _is_ours(self, job: Any) -> bool:
        return bool((job.metadata.labels or {}).get(INSTALLATION) == self._installation)

    def _delete(self, pilots: Pilots) -> None:
        try:
            self._batch.delete_namespaced_job(
                pilots.name,
                self._namespace,
                propagation_policy="Background",
                _request_timeout=REQUEST_SECONDS,
            )
        except client.ApiException as error:
            if error.status != 404:
                raise

    def _pods(self, job: Any) -> list[Any]:
        """List a job's pods by index, without those of an earlier job of the same name."""
        pods = self._core.list_namespaced_pod(
            self._namespace,
            label_selector=f"job-name={job.metadata.name}",
            limit=MOST_LISTED,
            _request_timeout=REQUEST_SECONDS,
        ).items
        owned = [
            pod
            for pod in pods
            if any(owner.uid == job.metadata.uid for owner in pod.metadata.owner_references or [])
        ]
        return sorted(owned, key=lambda pod: str(pod.metadata.name))

    def _obstacle(self, job: Any, pods: list[Any]) -> str:
        """Return why the first waiting pod, or the whole job, waits."""
        for pod in pods:
            if pod.status.phase == "Pending":
                return _waits(pod) or self._last_event(pod) or f"pod {pod.metadata.name} starts"
        event = self._last_event(job)
        if job.spec.suspend:
            queue = self._settings.kubernetes_queue
            return f"the queue {queue!r} has not admitted it" + (f": {event}" if event else "")
        return event or "its pods have not been created yet"

    def _last_event(self, about: Any) -> str:
        """Return the last event of a pod or job."""
        events = self._core.list_namespaced_event(
            self._namespace,
            field_selector=f"involvedObject.uid={about.metadata.uid}",
            limit=MOST_LISTED,
            _request_timeout=REQUEST_SECONDS,
        ).items
        own = [event for event in events if event.involved_object.uid == about.metadata.uid]
        if not own:
            return ""
        last = max(own, key=lambda event: str(event.last_timestamp or event.event_time or ""))
        return f"{last.reason}: {last.message}"

    def _read_log(self, pod: Any) -> str:
        try:
            text: str = self._core.read_namespaced_pod_log(
                pod.metadata.name,
                self._namespace,
                container=CONTAINER,
                tail_lines=MOST_LISTED,
                _request_timeout=REQUEST_SECONDS,
            )
        except client.ApiException as error:
            if error.status in (400, 404):  # it has not started, or is gone
                return ""
            raise
        return text


def _connect() -> Any:
    """Return a client of the cluster. Raises Invalid if none is configured."""
    settings = client.Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(settings)
        else:
            config.load_kube_config(client_configuration=settings)
    except config.ConfigException as error:
        message = (
            f"'kubernetes' has no cluster configuration: {error} Set KUBECONFIG, or run it in a pod"
        )
        raise Invalid({"HALFSTEP_PLACEMENT": message}) from error
    settings.retries = 0  # the placer retries itself
    return client.ApiClient(settings)


def _template(settings: Settings) -> dict[str, Any]:
    """Load the pod template. Raises Invalid."""
    path = settings.kubernetes_pod_template
    if path is None:
        return {}
    try:
        read = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
    else:
        parts = [read, read.get("spec", {})] if isinstance(read, dict) else [read]
        containers = parts[-1].get("containers", []) if isinstance(parts[-1], dict) else None
        if isinstance(containers, list) and all(
            isinstance(container, dict) for container in containers
        ):
            return dict(read)
        problem = "it is not a pod template"
    allowed = "allowed: YAML with metadata and spec, like `template` of a Job"
    raise Invalid({"HALFSTEP_KUBERNETES_POD_TEMPLATE": f"{str(path)!r}: {problem}; {allowed}"})


def _end(job: Any) -> Any:
    """Return the condition that ended a job, or None."""
    conditions = (job.status and job.status.conditions) or []
    ends = (condition for condition in conditions if condition.type in ("Complete", "Failed"))
    return next((end for end in ends if end.status == "True"), None)


def _failure(pod: Any) -> str:
    """Return why a pod failed, or "": evicted, out of memory, or by its exit code."""
    if pod.status.phase != "Failed":
        return ""
    if pod.status.reason:
        return f"pod {pod.metadata.name}: {pod.status.reason}: {pod.status.message or ''}"
    for status in pod.status.container_statuses or []:
        if status.state.terminated and status.state.terminated.exit_code:
            end = status.state.terminated
            return f"pod {pod.metadata.name}: {end.reason} (exit code {end.exit_code})"
    disruptions = [
        condition
        for condition in pod.status.conditions or []
        if condition.type == "DisruptionTarget"
    ]
    return f"pod {pod.metadata.name}: {disruptions[0].message if disruptions else 'failed'}"


def _waits(pod: Any) -> str:
    """Return why a pod waits, if Kubernetes reports it: for a node, or an image."""
    for status in pod.status.container_statuses or []:
        waiting = status.state.waiting
        if waiting and waiting.reason not in STARTING:
            return f"pod {pod.metadata.name}: {waiting.reason}: {waiting.message or ''}"
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"pod {pod.metadata.name}: {condition.reason}: {condition.message or ''}"
    return ""


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise OSError for errors of the cluster or its connection."""
    try:
        yield
    except client.ApiException as error:
        raise OSError(said(error)) from error
    except HTTPError as error:
        raise ConnectionError(f"Kubernetes does not answer: {error}") from error
