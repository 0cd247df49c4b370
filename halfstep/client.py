"""API client of a server, for scripts and notebooks.

    from halfstep import Client

    client = Client("http://127.0.0.1:8000", token)        (or HALFSTEP_URL and HALFSTEP_TOKEN,
                                                            or `halfstep login`)
    run = client.submit("digits", {"training": {"steps": 400}})
    run = client.wait(run["id"])
    client.series(run["id"])["loss"].value
    client.download(run["id"], folder)

Methods return the API's JSON, as described by the server's /api/v1/docs; series are numpy arrays.
"""

from halfstep.api_client.alert_calls import AlertCalls
from halfstep.api_client.artifact_calls import ArtifactCalls
from halfstep.api_client.errors import ApiError as ApiError
from halfstep.api_client.precision_calls import PrecisionCalls
from halfstep.api_client.saved_calls import SavedCalls
from halfstep.api_client.server_calls import ServerCalls
from halfstep.api_client.sweep_calls import SweepCalls


class Client(SavedCalls, SweepCalls, PrecisionCalls, AlertCalls, ArtifactCalls, ServerCalls):
    """Connection to one server as one user; as a context manager it closes on exit."""
