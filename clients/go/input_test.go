package kvfork

import (
	"regexp"
	"testing"
)

func TestTextOpensAContextWithBOSAndGoesOnWithout(t *testing.T) {
	if !continued(Text("a"), "").GetRaw().AddSpecialTokens {
		t.Error("no BOS where text opens a context")
	}
	if continued(Text("a"), "snapshots/a").GetRaw().AddSpecialTokens {
		t.Error("BOS in the middle of a context")
	}
	if continued(nil, "snapshots/a") != nil {
		t.Error("an input from nothing")
	}
}

func TestRequestIDs(t *testing.T) {
	uuid := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	first, second := requestID(""), requestID("")
	if !uuid.MatchString(first) || first == second {
		t.Errorf("%s, %s", first, second)
	}
	if requestID("mine") != "mine" {
		t.Error("the caller's own id is not taken")
	}
}
