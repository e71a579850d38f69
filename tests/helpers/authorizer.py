"""What service accounts may do, as the API server itself says."""

from cluster.api import ApiClient


class Authorizer:
    """What the API server's own authorizer says of a service account, NAMESPACE:NAME."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    def allows(self, account: str, verb: str, resource: str, namespace: str) -> bool:
        """``resource``: PLURAL[.GROUP][/SUBRESOURCE]."""
        whole, _, below = resource.partition("/")
        plural, _, group = whole.partition(".")
        asked = {
            "verb": verb,
            "group": group,
            "resource": plural,
            "subresource": below,
            "namespace": namespace,
        }
        user = {
            "user": f"system:serviceaccount:{account}",
            "groups": ["system:authenticated", "system:serviceaccounts"],
        }
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {**user, "resourceAttributes": asked},
        }
        review = self._client.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
        allowed: bool = review["status"]["allowed"]
        return allowed
