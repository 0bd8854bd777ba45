"""Projects over HTTP: an admin of the organisation makes and closes them, others see their own, all is written down."""

import time

import pytest

from tests.api import driving
from tests.api.test_requests import envelope


@pytest.fixture
def project(organization):
    return organization.post("/v1/projects", json={"name": "team a"}).json()


@pytest.fixture
def secret(organization, project):
    body = {"name": "lead", "project": project["id"], "scopes": ["admin"], "expires_in": "1h"}
    made = organization.post("/v1/keys", json=body)
    assert made.status_code == 201, made.text
    assert made.json()["project"] == project["id"]
    assert 3500 < made.json()["expires_at"] - time.time() < 3700
    return made.json()["secret"]


def test_a_project_is_made_given_a_key_renamed_and_closed_with_its_jobs(live, organization, project, secret):
    assert (project["object"], project["organization"], project["status"]) == ("project", "org-default", "active")
    with live.http(secret) as member:
        assert [one["id"] for one in member.get("/v1/projects").json()["data"]] == [project["id"]]
        waiting = driving.submit(member)["id"]
        running = driving.submit(member)["id"]
        fence = driving.claim(live.services, running)
        renamed = organization.patch(f"/v1/projects/{project['id']}", json={"name": "team b"}).json()
        # What is used grows while the job holds its slot.
        assert member.get(f"/v1/projects/{project['id']}").json() | {"usage": renamed["usage"]} == renamed
        assert renamed["usage"]["concurrent_jobs"] == 1
        assert renamed["name"] == "team b"

        for _ in range(2):
            closed = organization.post(f"/v1/projects/{project['id']}/archive").json()
            assert (closed["id"], closed["status"]) == (project["id"], "archived")
        envelope(member.get("/v1/jobs"), 401)
    with live.services.db.reading() as session:
        states = [session.get_one(driving.jobs.Job, id).state for id in (waiting, running)]
    assert states == ["cancelled", "cancelling"]
    assert fence == 1
    assert project["id"] not in {
        one["id"] for one in organization.get("/v1/projects", params={"limit": 100}).json()["data"]
    }
    everything = {"limit": 100, "include_archived": True}
    assert project["id"] in {one["id"] for one in organization.get("/v1/projects", params=everything).json()["data"]}
    envelope(organization.post("/v1/keys", json={"name": "late", "project": project["id"]}), 400)


def test_a_project_says_whose_jobs_may_stop_its_own(organization, project):
    assert project["preemption"] == "never"
    path = f"/v1/projects/{project['id']}"
    assert organization.patch(path, json={"preemption": "own"}).json()["preemption"] == "own"
    assert organization.patch(path, json={"name": "team c"}).json()["preemption"] == "own"
    envelope(organization.patch(path, json={"preemption": "all"}), 400)


def test_the_first_project_stays(organization):
    assert envelope(organization.post("/v1/projects/proj-default/archive"), 409)["code"] == "invalid_state"


def test_an_admin_of_a_project_manages_it_and_not_the_organisation(live, project, secret):
    with live.http(secret) as lead:
        envelope(lead.post("/v1/projects", json={"name": "mine too"}), 403)
        envelope(lead.patch(f"/v1/projects/{project['id']}", json={"name": "x"}), 403)
        envelope(lead.post(f"/v1/projects/{project['id']}/archive"), 403)
        made = lead.post("/v1/keys", json={"name": "ours"}).json()
        assert made["project"] == project["id"]
        assert lead.get(f"/v1/keys/{made['id']}").json() == {k: v for k, v in made.items() if k != "secret"}
        envelope(lead.post("/v1/keys", json={"name": "theirs", "project": "proj-default"}), 404)
        envelope(lead.get("/v1/keys", params={"project": "proj-default"}), 404)
        envelope(lead.patch("/v1/projects/proj-default", json={"name": "x"}), 404)


@pytest.mark.parametrize("header", ["OpenAI-Project", "OpenAI-Organization"])
def test_a_request_may_name_its_own_project_and_organisation_and_no_other(http, project, header):
    own = {"OpenAI-Project": http.get("/v1/projects").json()["data"][0]["id"], "OpenAI-Organization": "org-default"}
    for name in (own[header], ""):
        assert http.get("/v1/jobs", headers={header: name}).status_code == 200
    refused = [envelope(http.get("/v1/jobs", headers={header: name}), 401) for name in (project["id"], "proj-nobody")]
    assert refused[0] == refused[1]
    assert own[header] in refused[0]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"expires_in": "soon"}, "expires_in", id="no duration"),
        pytest.param({"expires_in": 0}, "expires_in", id="at once"),
        pytest.param({"expires_in": "1h", "expires_at": 2**31}, None, id="two ends"),
        pytest.param({"project": 7}, "project", id="a number for a project"),
    ],
)
def test_a_key_that_ends_never_or_twice_is_refused(http, body, param):
    assert envelope(http.post("/v1/keys", json={"name": "a", **body}), 400)["param"] == param


def test_each_change_is_written_down_with_who_and_where_and_never_a_secret(live, organization, project, secret):
    with live.http(secret) as lead:
        job = driving.submit(lead)
        cancelled = lead.post(f"/v1/jobs/{job['id']}/cancel")
        file = job["spec"]["data"]["train"][0]
        lead.delete(f"/v1/files/{file}")
        key = lead.post("/v1/keys", json={"name": "brief"}).json()
        lead.delete(f"/v1/keys/{key['id']}")
        lead.post(f"/v1/jobs/{job['id']}/cancel")
        own = lead.get("/v1/audit_logs").json()["data"]
    listed = organization.get("/v1/audit_logs", params={"project": project["id"]}).json()["data"]
    done = [(entry["action"], entry["object_id"]) for entry in listed]
    assert done[:6] == [
        ("api_key.revoked", key["id"]), ("api_key.created", key["id"]), ("file.deleted", file),
        ("job.cancelled", job["id"]), ("job.created", job["id"]), ("file.created", file),
    ]  # fmt: skip
    assert [action for action, _ in done[6:]] == ["api_key.created", "project.created"]
    assert listed[3]["request_id"] == cancelled.headers["x-request-id"]
    assert listed[3]["actor"]["project"] == project["id"]
    assert listed[3]["actor"]["address"] == "127.0.0.1"
    # The last part may have underscores of its own.
    assert key["secret"].split("_", 2)[2] not in str(listed)

    # The project sees the same, but of the organisation's admin no key and no address.
    assert own[:6] == listed[:6]
    assert own[-1]["actor"] == {"type": "organization", "key_id": None, "project": None, "address": None}


def test_the_audit_log_is_read_in_pages_and_by_what_is_looked_for(live, organization, project, secret):
    with live.http(secret) as lead:
        made = [lead.post("/v1/keys", json={"name": f"{number}"}).json()["id"] for number in range(3)]
        first = lead.get("/v1/audit_logs", params={"limit": 2, "action": "api_key.created"}).json()
        assert [entry["object_id"] for entry in first["data"]] == [made[2], made[1]]
        assert first["has_more"]
        after = first["data"][-1]["id"]
        rest = lead.get("/v1/audit_logs", params={"after": after, "action": "api_key.created"}).json()
        assert rest["data"][0]["object_id"] == made[0]
        (one,) = lead.get("/v1/audit_logs", params={"object_id": made[1]}).json()["data"]
        assert lead.get("/v1/audit_logs", params={"since": one["created_at"] + 3600}).json()["data"] == []
        me = one["actor"]["key_id"]
        by_me = lead.get("/v1/audit_logs", params={"key_id": me}).json()["data"]
        assert [entry["object_id"] for entry in by_me] == made[::-1]
        with live.http(live.key()) as stranger:
            envelope(stranger.get("/v1/audit_logs", params={"after": one["id"]}), 404)
            assert stranger.get("/v1/audit_logs", params={"project": project["id"]}).json()["data"] == []
            assert stranger.get("/v1/audit_logs", params={"key_id": me}).json()["data"] == []
    with live.http(live.key("submit")) as submitter:
        envelope(submitter.get("/v1/audit_logs"), 403)


@pytest.mark.parametrize("blank", ["", " ", "\t", "\x85", "\u2003", "a\x9bb", "two\nlines"])
@pytest.mark.parametrize(("path", "more"), [
    ("/v1/projects", {}),
    ("/v1/keys", {}),
    ("/v1/webhook_endpoints", {"url": "https://example.org/hook", "event_types": ["job.succeeded"]}),
])  # fmt: skip
def test_a_name_that_cannot_be_seen_is_refused(organization, path, more, blank):
    assert envelope(organization.post(path, json={"name": blank, **more}), 400)["param"] == "name"


def test_a_name_may_have_spaces_and_any_letters(organization):
    assert organization.post("/v1/projects", json={"name": " Équipe ☃ 1 "}).json()["name"] == " Équipe ☃ 1 "
