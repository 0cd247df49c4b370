"""Checks whether a Kubernetes cluster meets the requirements for placing runs."""

import json
from collections.abc import Iterator
from typing import Any

from kubernetes import client

from db.settings import Settings
from worker.clusters.cluster_check import Finding

REQUEST_SECONDS = 30.0
#: Requests of the placer: verb, API group, resource.
RIGHTS = [
    ("create", "batch", "jobs"),
    ("get", "batch", "jobs"),
    ("delete", "batch", "jobs"),
    ("list", "", "pods"),
    ("get", "", "pods/log"),
    ("list", "", "events"),
]
KUEUE = "kueue.x-k8s.io"


def findings(api: Any, settings: Settings, job: dict[str, Any]) -> Iterator[Finding]:
    """Check the cluster with this account's permissions. job: a manifest like those of runs."""
    version = client.VersionApi(api).get_code(_request_timeout=REQUEST_SECONDS)
    yield Finding("kubernetes", f"{api.configuration.host} answers: {version.git_version}")
    yield from _namespace(api, settings)
    yield _rights(api, settings.kubernetes_namespace)
    if settings.kubernetes_queue:
        yield _queue(api, settings)
    if not settings.kubernetes_secret and settings.kubernetes_pod_template is None:
        text = "HALFSTEP_KUBERNETES_SECRET is empty: pods would have no database address"
        yield Finding("secret", text, is_fine=False)
    yield _job(api, settings.kubernetes_namespace, job)


def _namespace(api: Any, settings: Settings) -> Iterator[Finding]:
    name = settings.kubernetes_namespace
    try:
        client.CoreV1Api(api).read_namespace(name, _request_timeout=REQUEST_SECONDS)
    except client.ApiException as error:
        if error.status == 404:
            text = f"there is no namespace {name!r}; see HALFSTEP_KUBERNETES_NAMESPACE"
            yield Finding("namespace", text, is_fine=False)
        elif error.status != 403:  # the permission to read namespaces is not needed
            raise
    else:
        yield Finding("namespace", f"{name} exists")


def _rights(api: Any, namespace: str) -> Finding:
    """Check which of the required permissions this account has."""
    reviews = client.AuthorizationV1Api(api)
    missing = []
    for verb, group, resource in RIGHTS:
        name, _, subresource = resource.partition("/")
        attributes = {"verb": verb, "group": group, "resource": name, "namespace": namespace}
        if subresource:
            attributes["subresource"] = subresource
        review = reviews.create_self_subject_access_review(
            {"spec": {"resourceAttributes": attributes}}, _request_timeout=REQUEST_SECONDS
        )
        if not review.status.allowed:
            missing.append(f"{verb} {resource}")
    if missing:
        text = f"in {namespace} this account lacks permission to {', '.join(missing)}"
        return Finding("rights", text, is_fine=False)
    return Finding("rights", f"in {namespace} this account has all required permissions")


def _queue(api: Any, settings: Settings) -> Finding:
    name, namespace = settings.kubernetes_queue, settings.kubernetes_namespace
    groups = client.ApisApi(api).get_api_versions(_request_timeout=REQUEST_SECONDS).groups
    kueue = next((group for group in groups if group.name == KUEUE), None)
    if kueue is None:
        text = f"{name!r} is configured, but the cluster has no Kueue"
        return Finding("queue", text, is_fine=False)
    place = (KUEUE, kueue.preferred_version.version, namespace, "localqueues", name)
    try:
        client.CustomObjectsApi(api).get_namespaced_custom_object(
            *place, _request_timeout=REQUEST_SECONDS
        )
    except client.ApiException as error:
        if error.status == 403:
            return Finding("queue", f"{name}, which this account may not read")
        if error.status != 404:
            raise
        return Finding("queue", f"{namespace} has no local queue {name!r}", is_fine=False)
    return Finding("queue", f"{name} is a local queue of {namespace}")


def _job(api: Any, namespace: str, job: dict[str, Any]) -> Finding:
    """Validate a job by a dry run on the cluster."""
    try:
        client.BatchV1Api(api).create_namespaced_job(
            namespace, job, dry_run="All", _request_timeout=REQUEST_SECONDS
        )
    except client.ApiException as error:
        if error.status in (400, 403, 404, 422):
            return Finding(
                "job", f"a job like the placer's is rejected: {said(error)}", is_fine=False
            )
        raise
    return Finding("job", "a job like the placer's would be accepted")


def said(error: Any) -> str:
    """Return the message of a Kubernetes error."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
