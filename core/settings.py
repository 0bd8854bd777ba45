"""Every setting, read once from the environment. Nothing else in the product reads configuration from there."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from difflib import get_close_matches
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from core import stays

Network = IPv4Network | IPv6Network

_LONGEST_SOCKET_PATH = 100
"""The kernel takes 107 bytes on Linux and 103 on macOS."""

NODE_NAME = "TRAINSHED_NODE_NAME"
"""The variable by which processes of a host know which node is theirs; what they start inherits it."""

_SCHEMES = {
    "database_url": ("postgresql://", "postgres://", "postgresql+psycopg://", "sqlite:///"),
    "redis_url": ("redis://", "rediss://", "unix://"),
    "storage_url": ("s3://", "file:///"),
    "hf_endpoint": ("https://", "http://"),
}
"""How the URLs begin that the service can use."""


def _either(name: str) -> AliasChoices:
    """The names a variable may have; the common one, without our prefix, is what hosting platforms set."""
    return AliasChoices(f"TRAINSHED_{name}", name)


def _networks(listed: str | None) -> tuple[Network, ...]:
    try:
        return tuple(ip_network(network.strip()) for network in (listed or "").split(",") if network.strip())
    except ValueError as error:
        raise ValueError("networks are needed, such as 10.1.0.0/16, with commas between them") from error


class Settings(BaseSettings):
    """Embedded by default: SQLite, a bundled Valkey, local files beneath `data_dir`. Other URLs make it a cluster."""

    # An empty variable is how files of variables leave one out.
    model_config = SettingsConfigDict(
        env_prefix="TRAINSHED_", env_ignore_empty=True, frozen=True, extra="ignore", populate_by_name=True
    )

    data_dir: Path = Path("trainshed-data")
    """Where the embedded parts keep everything, and where runs work."""
    host: str = "127.0.0.1"
    """Address that the API listens on."""
    port: int = Field(8642, ge=0, le=65535)
    """Port that the API listens on."""
    database_url: str | None = Field(None, repr=False, validation_alias=_either("DATABASE_URL"))
    """SQLAlchemy URL; PostgreSQL in production. Default: SQLite beneath `data_dir`."""
    redis_url: str | None = Field(None, repr=False, validation_alias=_either("REDIS_URL"))
    """Redis or Valkey. Default: the bundled server on a unix socket beneath `data_dir`."""
    storage_url: str | None = Field(None, repr=False, validation_alias=_either("STORAGE_URL"))
    """`file:///folder` or `s3://bucket/prefix`. Default: a folder beneath `data_dir`."""
    admin_key: str | None = Field(None, repr=False)
    """First admin key, at least 16 characters. Default: generated and shown once."""
    models_dir: Path | None = None
    """Folder whose subfolders are base models in Hugging Face layout. Default: `data_dir/models`."""
    slots: int | None = Field(None, ge=1)
    """Ranks that this host runs at once. Default: its GPUs, or its cores where it has none."""
    starts_at_once: int | None = Field(None, ge=1)
    """Ranks that this host starts at once, before others begin; one job alone may have more. Default: its cores."""
    nice: int = Field(10, ge=0, le=19)
    """How much a host's ranks give way to its other processes where cores are short, as the command `nice` means it."""
    node_name: str = Field(default_factory=socket.gethostname)
    """What this host is called in the cluster; a second node of the name is refused."""
    max_file_bytes: int = Field(512 * 1024**2, ge=1)
    """Largest upload, in bytes."""
    calibrate: bool = True
    """Measure when a worker first starts, which takes about four seconds, how fast this host is, for plans."""
    lease_seconds: float = Field(15.0, ge=1)
    """How long a silent supervisor keeps its job before another takes over, in seconds."""
    stop_grace_seconds: float = Field(30.0, ge=0)
    """How long a run that is told to pause or drain may take to save its state, in seconds; then it is killed."""
    cancel_grace_seconds: float = Field(2.0, ge=0)
    """How long a cancelled run may take to end, in seconds; then it is killed."""
    transfer_seconds: float = Field(6 * 3600.0, ge=1)
    """How long it may take to bring a job's data to its host, or to store its results, in seconds; then it is lost."""
    max_losses: int = Field(5, ge=1)
    """Attempts lost in a row, without a checkpoint between that comes further, before a job fails."""
    fair_share_half_life_hours: float = Field(24.0, gt=0, le=1e5)
    """Hours after which a project's use of slots counts half as much against its place in the queue."""
    requests_per_minute: int = Field(6000, ge=0)
    """Requests of one key in a minute, and at once after a pause; 0 sets no limit."""
    retention: str | None = None
    """How long things stay, such as `checkpoints.age=30d,logs.count=2,files.age=52w`. Default: for ever."""
    webhook_networks: str | None = None
    """Networks that webhooks may reach beside the public internet, such as `127.0.0.0/8,10.1.0.0/16`. Default: none."""
    hf_endpoint: str = Field("https://huggingface.co", validation_alias=_either("HF_ENDPOINT"))
    """The hub that `hf://` sources of models are fetched from, or a mirror of it."""
    hf_token: str | None = Field(None, repr=False, validation_alias=_either("HF_TOKEN"))
    """Token for the hub, sent to it alone, and only for what an admin of the organisation registers."""
    hf_hub_offline: bool = Field(False, validation_alias=_either("HF_HUB_OFFLINE"))
    """Ask no hub: `hf://` sources are refused."""
    hub_networks: str | None = None
    """Networks that a hub may redirect to beside the public internet, such as `10.1.0.0/16`. Default: none."""
    max_model_bytes: int = Field(256 * 1024**3, ge=1)
    """Largest base that is fetched from a hub, in bytes."""
    wandb_api_key: str | None = Field(None, repr=False)
    """Key of Weights & Biases: workers that have the package wandb pass on the jobs whose `integrations` say so."""
    log_level: str = "INFO"
    """Least severe log line that is written."""

    @field_validator(*_SCHEMES)
    @classmethod
    def begins_as_it_can(cls, url: str | None, field: ValidationInfo) -> str | None:
        schemes = _SCHEMES[str(field.field_name)]
        if url is not None and not url.startswith(schemes):
            raise ValueError(f"a URL that begins with {', '.join(schemes[:-1])} or {schemes[-1]} is needed")
        return url

    @field_validator("hf_endpoint")
    @classmethod
    def names_a_host(cls, url: str) -> str:
        parts = urlsplit(url)
        if not parts.hostname or "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("a host is needed, without user, query or fragment")
        return url.rstrip("/")

    @field_validator("hf_token")
    @classmethod
    def fits_a_header(cls, token: str | None) -> str | None:
        if token is not None and not re.fullmatch(r"[\x21-\x7e]+", token):
            raise ValueError("a token is characters of ASCII, none of them white space")
        return token

    @field_validator("admin_key")
    @classmethod
    def is_hard_to_guess(cls, key: str | None) -> str | None:
        if key is not None and not re.fullmatch(r"\S{16,}", key):
            raise ValueError("at least 16 characters are needed, none of them white space")
        return key

    @field_validator("log_level")
    @classmethod
    def is_a_level(cls, level: str) -> str:
        if level.upper() not in logging.getLevelNamesMapping():
            raise ValueError(f"there is no level {level!r}; take DEBUG, INFO, WARNING or ERROR")
        return level.upper()

    @field_validator("retention")
    @classmethod
    def is_a_list_of_rules(cls, rules: str | None) -> str | None:
        stays.parse(rules)
        return rules

    @field_validator("webhook_networks", "hub_networks")
    @classmethod
    def is_a_list_of_networks(cls, networks: str | None) -> str | None:
        _networks(networks)
        return networks

    @property
    def rules(self) -> dict[str, stays.Stay]:
        """The rules of `retention`, by kind."""
        return stays.parse(self.retention)

    @property
    def reachable(self) -> tuple[Network, ...]:
        """The networks of `webhook_networks`."""
        return _networks(self.webhook_networks)

    @property
    def hub_reachable(self) -> tuple[Network, ...]:
        """The networks of `hub_networks`."""
        return _networks(self.hub_networks)

    @property
    def database(self) -> str:
        """The SQLAlchemy URL in force, with psycopg 3 as PostgreSQL's driver."""
        if self.database_url is None:
            return f"sqlite:///{self.data_dir.absolute() / 'trainshed.db'}"
        scheme, _, rest = self.database_url.partition("://")
        return f"postgresql+psycopg://{rest}" if scheme in {"postgres", "postgresql"} else self.database_url

    @property
    def redis(self) -> str:
        """The broker's URL in force."""
        return self.redis_url or f"unix://{self.broker_socket}"

    @property
    def storage(self) -> str:
        """The storage URL in force."""
        return self.storage_url or (self.data_dir.absolute() / "storage").as_uri()

    @property
    def broker_socket(self) -> Path:
        """Where the bundled Valkey listens: beneath `data_dir`, or in a folder of our own if that path is too long."""
        path = self.data_dir.absolute() / "broker" / "valkey.sock"
        if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
            return path
        short = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"trainshed-{os.getuid()}-{short}" / "valkey.sock"

    @property
    def models(self) -> Path:
        """The folder of base models in force."""
        return (self.models_dir or self.data_dir / "models").absolute()

    @property
    def runs(self) -> Path:
        """Where attempts work on this host."""
        return self.data_dir.absolute() / "runs"

    @property
    def downloads(self) -> Path:
        """Where bases from a hub are put together on this host."""
        return self.data_dir.absolute() / "downloads"

    @property
    def fair_share_half_life(self) -> timedelta:
        return timedelta(hours=self.fair_share_half_life_hours)

    @property
    def lease(self) -> timedelta:
        return timedelta(seconds=self.lease_seconds)

    def environment(self) -> dict[str, str]:
        """These settings as environment variables, for the processes that belong to this service."""
        values = self.model_dump(exclude_none=True)
        return {f"TRAINSHED_{name.upper()}": os.fspath(value) if isinstance(value, Path) else str(value)
                for name, value in values.items()}  # fmt: skip


_OTHERS = frozenset({"URL", "API_KEY", "PATIENCE", "PUBLISH"})
"""Other variables with our prefix, that the command line, the client and docker-compose.yml read."""


def misspelt() -> list[str]:
    """What is wrong with each variable that has our prefix and that nothing reads."""
    known = sorted({name.upper() for name in Settings.model_fields} | _OTHERS)
    said = []
    for variable in sorted(os.environ):
        name = variable.upper().removeprefix("TRAINSHED_")
        if name in {variable.upper(), *known}:
            continue
        near = get_close_matches(name, known, n=1)
        meant = f"; TRAINSHED_{near[0]} is meant, perhaps" if near else ""
        said.append(f"{variable} is no setting and is ignored{meant}")
    return said


def complaints(error: ValidationError) -> str:
    """What is wrong with the settings, by the variables that set them. Values stay out: some are secret."""
    found = []
    for one in error.errors(include_input=False):
        name = str(one["loc"][0]).upper().removeprefix("TRAINSHED_")
        field = Settings.model_fields.get(name.lower())
        variable = name if field is not None and field.validation_alias else f"TRAINSHED_{name}"
        found.append(f"{variable}: {one['msg'].removeprefix('Value error, ')}")
    return "; ".join(found)


_TRAINER_MAY_SEE = re.compile(
    r"PATH|HOME|USER|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHONPATH|PYTHONDONTWRITEBYTECODE|XDG_CACHE_HOME"
    r"|(?:CUDA|NVIDIA|NCCL|GLOO|OMP|MKL|KMP|TORCH|TORCHINDUCTOR|PYTORCH|TRITON)_\w+"
)


def trainer_environment(devices: Sequence[int]) -> dict[str, str]:
    """What a trainer sees of our environment: how to find programs and libraries, nothing that opens a door.

    A list of what is let through, since nobody can list every name that a secret may have. `devices` are the GPUs it
    may use, by their index among those that this host shows us; none hides them all.
    """
    seen = {name: value for name, value in os.environ.items() if _TRAINER_MAY_SEE.fullmatch(name)}
    shown = visible_gpus()
    ids = [str(index) if shown is None else shown[index] for index in devices]
    # The run directory is where it works, so our own packages are found by path.
    ours = os.pathsep.join(filter(None, (os.fspath(Path(__file__).parents[1]), seen.get("PYTHONPATH"))))
    return seen | {"CUDA_VISIBLE_DEVICES": ",".join(ids), "PYTHONPATH": ours, "PYTHONUNBUFFERED": "1"}


def visible_gpus() -> list[str] | None:
    """The GPUs that this process is limited to, by index or UUID; None where there is no limit."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [name for name in value.split(",") if name]
