"""Pilots on Kubernetes: the official client with kmock as the API."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kmock import KubernetesEmulator, KubernetesError, KubernetesScaffold, Server
from kubernetes.config import kube_config

from db.errors import Invalid
from db.settings import Settings
from worker.clusters.cluster import of_placement
from worker.clusters.kubernetes import Kubernetes
from worker.clusters.placement import Pilots, PlacementRejected, open_placement

JOBS, PODS, EVENTS = "batch/v1/jobs", "v1/pods", "v1/events"
PLAIN = {"Content-Type": "text/plain"}
TWO = Pilots(1, 1, 2, 4)


@contextmanager
def serving(handler: KubernetesScaffold) -> Iterator[str]:
    """Run kmock in a thread; yield its address."""
    loop = asyncio.new_event_loop()
    urls: list[str] = []
    is_up, is_over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with handler, Server(handler) as server:
            urls.append(str(server.url))
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert is_up.wait(60)
        yield urls[0].rstrip("/")
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
        loop.close()


def lead_to(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the address of the server in the client's configuration."""
    named = {"name": "test"}
    path = folder / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "test",
                "clusters": [{**named, "cluster": {"server": url}}],
                "contexts": [{**named, "context": {"cluster": "test", "user": "test"}}],
                "users": [{**named, "user": {"token": "none"}}],
            }
        )
    )
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesEmulator]:
    """An empty cluster in the client's configuration."""
    handler = KubernetesEmulator()
    for resource in (JOBS, PODS, EVENTS):
        handler.resources[resource] = {}
    with serving(handler) as url:
        lead_to(url, tmp_path, monkeypatch)
        yield handler


def settings(folder: Path, **changes: Any) -> Settings:
    own = {"kubernetes_image": "lab/halfstep:1", "kubernetes_namespace": "lab"}
    return Settings(data=folder, placement="kubernetes", **(own | changes))


@pytest.fixture
def engine(api: KubernetesEmulator, tmp_path: Path) -> Kubernetes:
    made = open_placement(settings(tmp_path))
    assert isinstance(made, Kubernetes)
    return made


class Cluster:
    """Stand-ins for Kubernetes' controllers, as far as jobs need them."""

    def __init__(self, api: KubernetesEmulator, name: str = TWO.name) -> None:
        self.api, self.name = api, name
        self.job = api.objects[JOBS, "lab", name]
        self.job.patch({"metadata": {"uid": f"uid-{name}"}})

    def pod(self, index: int, phase: str, **status: Any) -> str:
        name = f"{self.name}-{index}-abcde"
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.name}
        self.api.objects[PODS, "lab", name] = {
            "metadata": {
                "name": name,
                "uid": f"uid-{name}",
                "ownerReferences": [{**owner, "uid": f"uid-{self.name}"}],
            },
            "spec": {"nodeName": f"n{index}", "containers": []},
            "status": {"phase": phase, **status},
        }
        return name

    def event(self, about: str, reason: str, message: str, minute: int = 0) -> None:
        self.api.objects[EVENTS, "lab", f"{about}.{reason}"] = {
            "metadata": {"name": f"{about}.{reason}"},
            "involvedObject": {"name": about, "uid": f"uid-{about}"},
            "reason": reason,
            "message": message,
            "lastTimestamp": f"2026-01-01T00:{minute:02}:00Z",
        }

    def end(self, kind: str, **words: str) -> None:
        self.job.patch({"status": {"conditions": [{"type": kind, "status": "True", **words}]}})


def test_a_run_is_one_indexed_job_however_often_it_is_placed(
    engine: Kubernetes, api: KubernetesEmulator
) -> None:
    """A run is one indexed job with a pod per node, however often it is placed or cancelled."""
    assert engine.poll(TWO).state == "gone"
    engine.place(TWO)
    engine.place(TWO)
    [(_resource, namespace, name)] = api.objects
    assert (namespace, name) == ("lab", "halfstep-1-1")
    spec = api.objects[JOBS, "lab", name].raw["spec"]
    wanted = {"completionMode": "Indexed", "parallelism": 2, "completions": 2, "backoffLimit": 0}
    assert {each: spec[each] for each in wanted} == wanted
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 60
    [worker] = pod["containers"]
    assert worker["command"] == ["halfstep", "worker", "--only", "1"]
    assert worker["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    engine.cancel(TWO)
    engine.cancel(TWO)
    assert engine.poll(TWO).reason == "Kubernetes has no such job"


def test_settings_stand_over_the_pod_template_and_secrets_in_neither(
    api: KubernetesEmulator, tmp_path: Path
) -> None:
    """Settings override the pod template, and secrets come by the Secret's name only."""
    template = tmp_path / "pod.yaml"
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    containers = [{"name": "worker", "volumeMounts": mounts, "image": "other"}]
    template.write_text(yaml.safe_dump({"spec": {"priority": 7, "containers": containers}}))
    changes = {"service_account": "trainer", "queue": "team", "secret": "halfstep"}
    changes |= {"resource": "", "pod_template": template}
    result = {f"kubernetes_{name}": value for name, value in changes.items()}
    database_url = "postgresql://me:hunter2@box/halfstep"
    made = settings(tmp_path, stop_grace_seconds=90, database_url=database_url, **result)
    job = Kubernetes(made).manifest(TWO)
    assert "hunter2" not in repr(job)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["spec"]["suspend"] is True
    pod = job["spec"]["template"]["spec"]
    assert (pod["priority"], pod["serviceAccountName"]) == (7, "trainer")
    assert pod["terminationGracePeriodSeconds"] == 180
    [worker] = pod["containers"]
    assert (worker["image"], worker["volumeMounts"]) == ("lab/halfstep:1", mounts)
    assert worker["envFrom"] == [{"secretRef": {"name": "halfstep"}}]
    assert "resources" not in worker


UNSCHEDULABLE = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        }
    ]
}


def container(**state: Any) -> dict[str, Any]:
    own = {"name": "worker", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    return {"containerStatuses": [{**own, "state": state}]}


PULLING = container(waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling image"})
CREATING = container(waiting={"reason": "ContainerCreating"})
KILLED = container(terminated={"reason": "OOMKilled", "exitCode": 137})


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (UNSCHEDULABLE, "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        (PULLING, "ImagePullBackOff: Back-off pulling image"),
        (CREATING, 'FailedMount: secret "halfstep" not found'),
    ],
)
def test_the_pending_reason_of_a_pod_is_that_of_kubernetes(
    engine: Kubernetes, api: KubernetesEmulator, status: dict[str, Any], words: str
) -> None:
    """A run that waits for one of its pods has that pod's reason from Kubernetes."""
    engine.place(TWO)
    cluster = Cluster(api)
    cluster.pod(0, "Running")
    name = cluster.pod(1, "Pending", **status)
    cluster.event(name, "Scheduled", "assigned to n1")
    cluster.event(name, "FailedMount", 'secret "halfstep" not found', minute=1)
    pilots = engine.poll(TWO)
    assert pilots.state == "waiting"
    assert pilots.reason.startswith("Kubernetes job halfstep-1-1 waits: ")
    assert pilots.reason.endswith(words)


def test_a_job_without_pods_says_why(api: KubernetesEmulator, tmp_path: Path) -> None:
    """A job without pods has the reason: a quota, or a queue that has not admitted it."""
    engine = Kubernetes(settings(tmp_path))
    engine.place(TWO)
    Cluster(api).event(TWO.name, "FailedCreate", "exceeded quota")
    assert engine.poll(TWO).reason.endswith("waits: FailedCreate: exceeded quota")
    queued = Kubernetes(settings(tmp_path, kubernetes_queue="team"))
    other = Pilots(2, 1, 1, 1)
    queued.place(other)
    cluster = Cluster(api, other.name)
    assert queued.poll(other).reason.endswith("the queue 'team' has not admitted it")
    cluster.event(other.name, "Suspended", "Kueue: insufficient quota")
    assert queued.poll(other).reason.endswith("admitted it: Suspended: Kueue: insufficient quota")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (KILLED, "OOMKilled (exit code 137)"),
        ({"reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory"),
        (
            {
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "message": "node drained"}
                ]
            },
            "node drained",
        ),
    ],
)
def test_the_end_of_a_pod_is_explained(
    engine: Kubernetes, api: KubernetesEmulator, status: dict[str, Any], words: str
) -> None:
    """A failed pod's reason is kept; a later attempt is another job."""
    engine.place(TWO)
    cluster = Cluster(api)
    cluster.pod(0, "Running")
    assert engine.poll(TWO).state == "waiting"
    cluster.pod(1, "Running")
    assert engine.poll(TWO).reason == "Kubernetes job halfstep-1-1 on n0, n1"
    assert engine.poll(TWO).state == "running"
    cluster.pod(1, "Failed", **status)
    assert words in engine.poll(TWO).reason
    cluster.end("Failed", reason="BackoffLimitExceeded", message="Job has reached the limit")
    pilots = engine.poll(TWO)
    assert pilots.state == "gone"
    assert words in pilots.reason


def test_a_job_that_is_over_makes_way_for_the_next_try(
    engine: Kubernetes, api: KubernetesEmulator
) -> None:
    """A finished job's remaining pods do not count for the next job."""
    engine.place(TWO)
    cluster = Cluster(api)
    cluster.pod(0, "Succeeded")
    cluster.pod(1, "Succeeded")
    cluster.end("Complete", message="Reached expected number of succeeded pods")
    assert engine.poll(TWO).reason.endswith("ended: Reached expected number of succeeded pods")
    engine.place(TWO)
    api.objects[JOBS, "lab", TWO.name].patch({"metadata": {"uid": "another"}, "status": None})
    assert engine.poll(TWO).reason.endswith("its pods have not been created yet")


def test_what_its_pods_print_is_their_log(engine: Kubernetes, api: KubernetesEmulator) -> None:
    """The log has the output of all pods that have started."""
    engine.place(TWO)
    cluster = Cluster(api)
    first, second = cluster.pod(0, "Running"), cluster.pod(1, "Pending")
    path = "/api/v1/namespaces/lab/pods/{}/log"
    api[f"get {path.format(first)}"] << PLAIN << b"worker: run 1\n"
    api[f"get {path.format(second)}"] << KubernetesError(status=400, message="is waiting to start")
    assert engine.log(TWO) == "worker: run 1\n"


def test_another_installations_jobs_are_not_changed(
    engine: Kubernetes, api: KubernetesEmulator, tmp_path: Path
) -> None:
    """Jobs of another installation with the same run number are not changed."""
    engine.place(TWO)
    other = Kubernetes(settings(tmp_path / "other"))
    assert other.poll(TWO).state == "gone"
    other.cancel(TWO)
    with pytest.raises(PlacementRejected, match="has a job halfstep-1-1 of another installation"):
        other.place(TWO)
    assert engine.poll(TWO).state == "waiting"


def test_a_rejection_of_kubernetes_fails_the_run_and_silence_does_not(
    engine: Kubernetes, api: KubernetesEmulator
) -> None:
    """A quota or a webhook fails the run with its message; an API that fails is retried."""
    words = "admission webhook denied the request: no image from there"
    api["post /apis/batch/v1/namespaces/lab/jobs"] << KubernetesError(status=403, message=words)
    with pytest.raises(PlacementRejected, match="no image from there"):
        engine.place(TWO)
    path = f"get /apis/batch/v1/namespaces/lab/jobs/{TWO.name}"
    api[path] << KubernetesError(status=503, message="etcd is away")
    calls: list[Callable[[Pilots], Any]] = [engine.place, engine.poll, engine.cancel, engine.log]
    for call in calls:
        with pytest.raises(OSError, match="etcd is away"):
            call(TWO)


def test_an_api_that_is_away_is_waited_for(
    api: KubernetesEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API that does not respond raises ConnectionError."""
    lead_to("http://127.0.0.1:9", tmp_path, monkeypatch)
    with pytest.raises(ConnectionError, match="does not answer"):
        Kubernetes(settings(tmp_path)).poll(TWO)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("spec: [", "while parsing"),
        ("- a", "not a pod template"),
        ("spec: {containers: [a]}", "not a pod"),
    ],
)
def test_an_invalid_pod_template_is_rejected(tmp_path: Path, text: str, words: str) -> None:
    """An invalid pod template is rejected before any run is placed."""
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    with pytest.raises(Invalid, match=f"HALFSTEP_KUBERNETES_POD_TEMPLATE: .*{words}.*allowed"):
        Kubernetes(settings(tmp_path, kubernetes_pod_template=path))


def test_settings_that_kubernetes_cannot_do_without_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubernetes needs an image and valid names, which errors name."""
    monkeypatch.setenv("HALFSTEP_PLACEMENT", "kubernetes")
    with pytest.raises(
        Invalid, match=r"HALFSTEP_KUBERNETES_IMAGE.*required by HALFSTEP_PLACEMENT=kubernetes"
    ):
        Settings.read()
    monkeypatch.setenv("HALFSTEP_KUBERNETES_IMAGE", "lab/halfstep:1")
    monkeypatch.setenv("HALFSTEP_KUBERNETES_NAMESPACE", "Lab_1")
    with pytest.raises(Invalid, match="HALFSTEP_KUBERNETES_NAMESPACE: 'Lab_1'"):
        Settings.read()


REVIEWS = "post /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
NEW_JOBS = "post /apis/batch/v1/namespaces/lab/jobs"
NAMESPACE = "get /api/v1/namespaces/lab"


def groups(*names: str) -> dict[str, Any]:
    """Return the response to /apis."""
    versions = {name: {"groupVersion": f"{name}/v1beta2", "version": "v1beta2"} for name in names}
    listed = [
        {"name": name, "preferredVersion": version, "versions": [version]}
        for name, version in versions.items()
    ]
    return {"groups": listed}


def run_check(tmp_path: Path, **changes: Any) -> dict[str, str]:
    """Run `halfstep cluster check` on the cluster; return its findings by subject."""
    found = of_placement(settings(tmp_path, **changes))
    return {each.what: f"{'ok' if each.is_fine else 'NO'} {each.text}" for each in found}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesScaffold]:
    """A cluster that returns a test's responses, without state."""
    handler = KubernetesScaffold()
    handler.resources[JOBS] = {}
    parts = ("buildDate", "compiler", "gitCommit", "gitTreeState", "goVersion", "major", "minor")
    handler["get /version/"] << {**dict.fromkeys((*parts, "platform"), ""), "gitVersion": "v1.34"}
    with serving(handler) as url:
        lead_to(url, tmp_path, monkeypatch)
        yield handler


def test_a_complete_cluster_is_reported(bare: KubernetesScaffold, tmp_path: Path) -> None:
    """The check of a complete cluster has address, namespace, permissions, queue and a dry-run
    job.
    """
    kueue = "kueue.x-k8s.io"
    bare["get /apis/"] << groups("batch", kueue)
    bare[f"get /apis/{kueue}/v1beta2/namespaces/lab/localqueues/team"] << {
        "metadata": {"name": "team"}
    }
    bare[NAMESPACE] << {"metadata": {"name": "lab"}}
    bare[REVIEWS] << {"spec": {}, "status": {"allowed": True}}
    bare[NEW_JOBS] << {"spec": {"template": {}}}
    said = run_check(tmp_path, kubernetes_secret="halfstep", kubernetes_queue="team")
    assert said.pop("kubernetes").endswith("answers: v1.34")
    assert said == {
        "namespace": "ok lab exists",
        "rights": "ok in lab this account has all required permissions",
        "queue": "ok team is a local queue of lab",
        "job": "ok a job like the placer's would be accepted",
    }
    assert list(bare)[-1].params == {"dryRun": "All"}
    other = run_check(tmp_path, kubernetes_secret="halfstep", kubernetes_queue="other")
    assert other["queue"] == "NO lab has no local queue 'other'"


def test_missing_parts_of_a_cluster_are_named(bare: KubernetesScaffold, tmp_path: Path) -> None:
    """All missing parts of a cluster are named at once."""

    def review(request: Any) -> dict[str, Any]:
        asked = request.data["spec"]["resourceAttributes"]
        is_allowed = asked["resource"] == "jobs" and asked["namespace"] == "lab"
        return {"spec": {}, "status": {"allowed": is_allowed}}

    bare["get /apis/"] << groups("batch")
    bare[NAMESPACE] << KubernetesError(status=404)
    bare[REVIEWS] << review
    bare[NEW_JOBS] << KubernetesError(status=403, message="no image from there")
    said = run_check(tmp_path, kubernetes_queue="team")
    assert said["namespace"] == "NO there is no namespace 'lab'; see HALFSTEP_KUBERNETES_NAMESPACE"
    wanted = "list pods, get pods/log, list events"
    assert said["rights"] == f"NO in lab this account lacks permission to {wanted}"
    assert said["queue"] == "NO 'team' is configured, but the cluster has no Kueue"
    assert said["secret"].startswith("NO HALFSTEP_KUBERNETES_SECRET is empty")
    assert said["job"] == "NO a job like the placer's is rejected: no image from there"


def test_an_unreachable_cluster_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing cluster configuration, or an unresponsive cluster, is reported."""
    lead_to("http://127.0.0.1:9", tmp_path, monkeypatch)
    assert "NO Kubernetes does not answer" in run_check(tmp_path)["kubernetes"]
    (tmp_path / "kubeconfig").unlink()
    assert (
        "NO HALFSTEP_PLACEMENT: 'kubernetes' has no cluster configuration"
        in run_check(tmp_path)["kubernetes"]
    )
