"""The manifests for Kubernetes agree with the scripts that they start and with the
front.

Whether they are valid is tried by hand, against the schemas of the API: DEPLOY.md.
"""

import re
from pathlib import PurePosixPath

import pytest
import yaml

from tests.support.files import ROOT, text_of

FOLDER = ROOT / "scripts" / "deploy" / "kubernetes"
SIDES = ("superlink", "supernode")
each_side = pytest.mark.parametrize("side", SIDES)


def documents(side):
    return list(yaml.safe_load_all(text_of(FOLDER / side / f"{side}.yaml")))


def of_kind(side, kind):
    (document,) = [item for item in documents(side) if item["kind"] == kind]
    return document


def pod_of(side):
    return of_kind(side, "StatefulSet")["spec"]["template"]["spec"]


def kustomization(side):
    return yaml.safe_load(text_of(FOLDER / side / "kustomization.yaml"))


def files_given(side):
    """The files of each secret and config map, by its name."""
    made = kustomization(side)
    generators = made["secretGenerator"] + made.get("configMapGenerator", [])
    return {
        generator["name"]: {PurePosixPath(file).name for file in generator["files"]}
        for generator in generators
    }


@each_side
def test_a_container_starts_a_script_by_its_own_options(side):
    _, script, *arguments = pod_of(side)["containers"][0]["command"]
    source = text_of(ROOT / script)
    options, values = arguments[::2], arguments[1::2]
    assert set(options) <= set(
        re.findall(r"^ +(--[a-z-]+)\) \w+=", source, re.MULTILINE)
    )
    needed = re.findall(r"^need (--[a-z-]+)", source, re.MULTILINE)
    assert set(needed) <= set(options)
    assert not any(value.startswith("--") for value in values)


@each_side
def test_what_is_mounted_is_there(side):
    pod = pod_of(side)
    claims = of_kind(side, "StatefulSet")["spec"]["volumeClaimTemplates"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    names = {*volumes, *(claim["metadata"]["name"] for claim in claims)}
    given = files_given(side)
    for container in pod["containers"]:
        mounts = container["volumeMounts"]
        assert {mount["name"] for mount in mounts} <= names
        for mount in mounts:
            volume = volumes.get(mount["name"], {})
            source = volume.get("secret", {}).get("secretName")
            source = source or volume.get("configMap", {}).get("name")
            if not source:
                continue
            assert source in given
            # the files that the command names below the mount
            below = re.compile(rf"{re.escape(mount['mountPath'])}/([\w.-]+)$")
            named = [below.match(word) for word in container["command"]]
            assert {found[1] for found in named if found} <= given[source]


@each_side
def test_no_container_may_more_than_the_restricted_standard_lets_it(side):
    assert of_kind(side, "Namespace")["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted"
    }
    pod = pod_of(side)
    assert not pod["automountServiceAccountToken"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "livenessProbe" in container


@each_side
def test_a_private_key_is_no_bodys_but_the_groups(side):
    """Scripts refuse a key that others may read; the user is in the volume's group."""
    pod = pod_of(side)
    (mode,) = [v["secret"]["defaultMode"] for v in pod["volumes"] if "secret" in v]
    assert mode == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    # a mount is its group's, too: the state is a folder of the user's own below it
    command = pod["containers"][0]["command"]
    assert command[command.index("--state") + 1].startswith("/state/")


def test_nothing_is_let_in_but_to_the_front():
    listening = re.findall(r"listen (\d+)", text_of(ROOT / "scripts/deploy/nginx.conf"))
    front = pod_of("superlink")["containers"][1]
    (port,) = front["ports"]
    assert listening == [str(port["containerPort"])]
    assert of_kind("superlink", "Service")["spec"]["ports"] == [
        {"name": "front", "port": port["containerPort"], "targetPort": port["name"]}
    ]
    policy = of_kind("superlink", "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": port["name"]}]}]
    assert policy["egress"] == []
    site = of_kind("supernode", "NetworkPolicy")["spec"]
    assert site["policyTypes"] == ["Ingress", "Egress"]
    assert site["ingress"] == []
    (superlink,) = [
        each["port"]
        for rule in site["egress"]
        for each in rule["ports"]
        if each["port"] != 53
    ]
    assert superlink == port["containerPort"]
