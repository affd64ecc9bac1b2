package kvfork

import "testing"

func TestTokensDoNotCrossANetworkInTheClear(t *testing.T) {
	token := WithToken("secret")
	for _, one := range []struct {
		address string
		options []DialOption
		refused bool
	}{
		{"127.0.0.1:1", []DialOption{token}, false},
		{"[::1]:1", []DialOption{token}, false},
		{"localhost:1", []DialOption{token}, false},
		{"unix:/tmp/socket", []DialOption{token}, false},
		{"/tmp/socket", []DialOption{token}, false},
		{"example.org:1", []DialOption{token}, true},
		{"10.0.0.1:1", []DialOption{token}, true},
		{"example.org:1", []DialOption{token, WithTLS(nil)}, false},
		{"example.org:1", []DialOption{token, WithTokenInClear()}, false},
		{"example.org:1", nil, false},
		{"", nil, true},
		{"http://127.0.0.1:1", nil, true},
	} {
		client, err := Dial(one.address, one.options...)
		if (err != nil) != one.refused {
			t.Errorf("%q with %d options: %v", one.address, len(one.options), err)
		}
		if client != nil {
			client.Close()
		}
	}
}
