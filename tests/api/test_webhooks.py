"""Webhooks as the unmodified openai client has them: endpoints over its calls, messages verified by it."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import openai
import pytest
from sqlalchemy import update

from api.app import POSTING_AT_ONCE, POSTING_OF_A_PROJECT
from core import webhooks
from core.models import WebhookDelivery, WebhookEndpoint, database_now
from tests.api import driving
from tests.api.conftest import wait_for
from tests.api.test_models import base
from tests.api.test_requests import envelope
from tests.fakes.receiver import receiving
from workers.courier import Courier
from workers.duties import beside

__all__ = ["base"]

ENDS = ["fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled"]


@pytest.fixture(scope="module")
def courier(live):
    made = Courier(live.services)
    with beside(made.run, "courier"):
        yield made


@pytest.fixture
def receiver():
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def sdk(live, key):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=key) as client:
        yield client


def test_endpoints_are_made_listed_changed_and_deleted(sdk, http):
    assert set(ENDS) < set(sdk.webhooks.event_types.list().data)
    made = [sdk.webhooks.create(name=f"n{n}", url=f"https://example.com/{n}", event_types=ENDS[:2]) for n in range(3)]
    first = made[0]
    assert first.signing_secret.startswith("whsec_")
    assert [one.id for one in sdk.webhooks.list(limit=1)] == [one.id for one in reversed(made)]
    got = sdk.webhooks.retrieve(first.id)
    assert (got.name, got.url, got.event_types) == ("n0", "https://example.com/0", ENDS[:2])
    assert got.signing_secret_hint.endswith(first.signing_secret[-4:])
    for answer in (http.get("/v1/webhook_endpoints"), http.get(f"/v1/webhook_endpoints/{first.id}")):
        assert first.signing_secret not in answer.text
    changed = sdk.webhooks.update(first.id, name="ci", event_types=["fine_tuning.job.failed"])
    assert (changed.name, changed.url, changed.event_types) == ("ci", got.url, ["fine_tuning.job.failed"])
    assert sdk.webhooks.update(first.id, name="ci").updated_at == changed.updated_at
    assert sdk.webhooks.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError):
        sdk.webhooks.retrieve(first.id)


def ended(live, http, how, base):
    job = driving.submit(http, kind="finetune", model={"base": base}, tokenizer={"from": "base"})["id"]
    if how == "cancelled":
        http.post(f"/v1/jobs/{job}/cancel")
    else:
        fence = driving.claim(live.services, job)
        (driving.succeed_from_start if how == "succeeded" else driving.fail)(live.services, job, fence)
    return job


@pytest.mark.parametrize("how", ["succeeded", "failed", "cancelled"])
def test_the_end_of_a_job_arrives_signed(live, http, sdk, courier, receiver, base, how):
    endpoint = sdk.webhooks.create(name="ci", url=receiver.url, event_types=ENDS)
    job = ended(live, http, how, base)
    message = receiver.next()
    event = sdk.webhooks.unwrap(message.body, message.headers, secret=endpoint.signing_secret)
    assert (event.type, event.data.id, event.object) == (f"fine_tuning.job.{how}", job, "event")
    assert sdk.fine_tuning.jobs.retrieve(event.data.id).status == how
    with pytest.raises(openai.InvalidWebhookSignatureError):
        sdk.webhooks.unwrap(message.body + b" ", message.headers, secret=endpoint.signing_secret)
    (told,) = wait_for(
        lambda: [one for one in deliveries(http, endpoint.id) if one["status"] == "delivered"]
    )  # fmt: skip
    assert (told["id"], told["attempts"], told["last_error"]) == (message.headers["Webhook-Id"], 1, None)
    assert receiver.came.empty()


def deliveries(http, endpoint):
    return http.get(f"/v1/webhook_endpoints/{endpoint}/deliveries").json()["data"]


def come_due(live, endpoint):
    with live.services.db.session() as session:
        due = update(WebhookDelivery).where(
            WebhookDelivery.endpoint_id == endpoint, WebhookDelivery.due_at.is_not(None)
        )
        session.execute(due.values(due_at=database_now()))


def test_what_did_not_arrive_is_sent_again_under_the_same_id(live, http, sdk, courier, receiver, base):
    receiver.answers = [500, 302]
    receiver.location = "http://169.254.169.254/"
    endpoint = sdk.webhooks.create(name="ci", url=receiver.url, event_types=["job.cancelled"])
    ended(live, http, "cancelled", base)
    came = [receiver.next()]
    for attempt, status in enumerate((500, 302), start=1):
        (waiting,) = wait_for(lambda: [one for one in deliveries(http, endpoint.id) if one["last_error"]])
        wait_for(lambda status=status: str(status) in deliveries(http, endpoint.id)[0]["last_error"])
        assert (waiting["status"], deliveries(http, endpoint.id)[0]["attempts"]) == ("waiting", attempt)
        come_due(live, endpoint.id)
        came.append(receiver.next())
    assert len({(message.headers["Webhook-Id"], message.body) for message in came}) == 1
    for message in came:
        sdk.webhooks.verify_signature(message.body, message.headers, secret=endpoint.signing_secret)
    assert json.loads(came[0].body)["data"]["state"] == "cancelled"


def test_an_endpoint_that_is_gone_hears_nothing_more_of_it(live, http, sdk, courier, receiver, base):
    receiver.answers = [410]
    endpoint = sdk.webhooks.create(name="ci", url=receiver.url, event_types=ENDS)
    ended(live, http, "cancelled", base)
    (told,) = wait_for(lambda: [one for one in deliveries(http, endpoint.id) if one["last_error"]])
    assert (told["status"], told["next_attempt_at"]) == ("given_up", None)


def test_a_secret_is_rotated_and_the_old_one_may_stay_for_a_day(live, sdk, receiver):
    endpoint = sdk.webhooks.create(name="ci", url=receiver.url, event_types=ENDS)
    secrets = [endpoint.signing_secret]

    def good():
        assert sdk.webhooks.test(endpoint.id, event_type=ENDS[0]).status_code == 204
        message = receiver.next()
        return [verifies(sdk, message, secret) for secret in secrets]

    secrets.append(sdk.webhooks.rotate_secret(endpoint.id, keep_old_secret_active_for_24_hours=True).signing_secret)
    assert good() == [True, True]
    with live.services.db.session() as session:
        row = session.get_one(WebhookEndpoint, endpoint.id)
        assert row.old_secret_until is not None
        row.old_secret_until -= timedelta(hours=24).total_seconds()
    assert good() == [False, True]
    secrets.append(sdk.webhooks.rotate_secret(endpoint.id).signing_secret)
    assert good() == [False, False, True]


def verifies(sdk, message, secret):
    try:
        sdk.webhooks.verify_signature(message.body, message.headers, secret=secret)
    except openai.InvalidWebhookSignatureError:
        return False
    return True


def test_a_sample_is_sent_once_and_its_status_told(sdk, receiver):
    endpoint = sdk.webhooks.create(name="ci", url=receiver.url, event_types=ENDS)
    receiver.answers = [503]
    result = sdk.webhooks.test(endpoint.id, event_type="fine_tuning.job.failed")
    assert (result.status_code, result.success, result.webhook_endpoint_id) == (503, True, endpoint.id)
    message = receiver.next()
    event = sdk.webhooks.unwrap(message.body, message.headers, secret=endpoint.signing_secret)
    assert event.type == "fine_tuning.job.failed"
    with pytest.raises(openai.BadRequestError, match=r"batch\.completed"):
        sdk.webhooks.test(endpoint.id, event_type="batch.completed")
    sdk.webhooks.update(endpoint.id, url="http://127.0.0.1:1/")
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.webhooks.test(endpoint.id, event_type=ENDS[0])
    assert caught.value.code == "undelivered"
    assert receiver.came.empty()


def test_samples_of_one_project_to_an_endpoint_that_never_answers_keep_no_other_waiting(live, sdk, receiver):
    with receiving() as deaf, openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.key()) as flood:
        deaf.silent = True
        theirs = flood.webhooks.create(name="deaf", url=deaf.url, event_types=ENDS)
        ours = sdk.webhooks.create(name="ci", url=receiver.url, event_types=ENDS)
        with ThreadPoolExecutor(2 * POSTING_AT_ONCE) as pool:
            sent = [pool.submit(send, live, flood.api_key, theirs.id) for _ in range(2 * POSTING_AT_ONCE)]
            for _ in range(POSTING_OF_A_PROJECT):
                deaf.next()
            assert send(live, sdk.api_key, ours.id).status_code == 200
            assert deaf.came.empty()
            deaf.closing.set()
            deaf.silent = False
            assert {one.result().status_code for one in sent} <= {200, 400}


def send(live, key, endpoint):
    with live.http(key) as http:
        return http.post(f"/v1/webhook_endpoints/{endpoint}/test", json={"event_type": "job.failed"})


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        pytest.param({"url": "http://10.0.0.1/"}, "url", id="an address inside"),
        pytest.param({"url": "gopher://example.com/"}, "url", id="another scheme"),
        pytest.param({"url": "https://example.com/\r\nx: y"}, "url", id="a header in it"),
        pytest.param({"event_types": []}, "event_types", id="nothing to tell"),
        pytest.param({"event_types": ["batch.completed"]}, "event_types", id="what never happens"),
        pytest.param({"name": ""}, "name", id="no name"),
        pytest.param({"secret": "mine"}, "secret", id="an unknown field"),
    ],
)
def test_what_cannot_be_an_endpoint_is_refused(http, changes, param):
    new = {"name": "ci", "url": "https://example.com/", "event_types": ENDS}
    assert envelope(http.post("/v1/webhook_endpoints", json=new | changes), 400)["param"] == param
    made = http.post("/v1/webhook_endpoints", json=new).json()["id"]
    assert envelope(http.post(f"/v1/webhook_endpoints/{made}", json=changes), 400)["param"] == param


def test_a_project_has_so_many_endpoints_and_no_more(http):
    new = {"name": "ci", "url": "https://example.com/", "event_types": ENDS}
    answers = [http.post("/v1/webhook_endpoints", json=new) for _ in range(webhooks.MOST_ENDPOINTS + 1)]
    assert "at most 20" in envelope(answers.pop(), 400)["message"]
    assert {answer.status_code for answer in answers} == {200}


def test_nobody_learns_that_another_projects_endpoint_exists(live, http):
    new = {"name": "ci", "url": "https://example.com/", "event_types": ENDS}
    made = http.post("/v1/webhook_endpoints", json=new).json()["id"]
    with live.http(live.key()) as stranger:
        for method, path, body in [
            ("GET", "", None), ("POST", "", {"name": "x"}), ("DELETE", "", None), ("POST", "/rotate_secret", {}),
            ("POST", "/test", {"event_type": ENDS[0]}), ("GET", "/deliveries", None),
        ]:  # fmt: skip
            answers = [
                envelope(stranger.request(method, f"/v1/webhook_endpoints/{id_}{path}", json=body), 404)
                for id_ in (made, "whe-0")
            ]
            assert answers[0]["message"].replace(made, "whe-0") == answers[1]["message"]
        assert stranger.get("/v1/webhook_endpoints").json()["data"] == []
