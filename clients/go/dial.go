package kvfork

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

// maxReceiveBytes: token lists and log-probabilities of long contexts pass gRPC's 4 MiB.
const maxReceiveBytes = 64 << 20

// serviceConfig: only UNAVAILABLE is safe to repeat blindly, and gRPC repeats it only while no reply has begun, unless
// the server says not to.
const serviceConfig = `{"methodConfig": [{
	"name": [
		{"service": "kvfork.v1.InferenceService"},
		{"service": "kvfork.v1.SnapshotService"},
		{"service": "kvfork.v1.ServerService"}
	],
	"retryPolicy": {
		"maxAttempts": 4, "initialBackoff": "0.2s", "maxBackoff": "3s", "backoffMultiplier": 2.5,
		"retryableStatusCodes": ["UNAVAILABLE"]
	}
}]}`

// DialOption says how to talk to a server.
type DialOption func(*dialing)

type dialing struct {
	token        string
	tls          *tls.Config
	retry        bool
	tokenInClear bool
	more         []grpc.DialOption
}

// WithToken sends a bearer token with every call. Off this machine it needs WithTLS.
func WithToken(token string) DialOption { return func(d *dialing) { d.token = token } }

// WithTokenInClear lets the token cross a network without TLS, for one that is trusted.
func WithTokenInClear() DialOption { return func(d *dialing) { d.tokenInClear = true } }

// WithTLS encrypts. nil checks the server against the system's roots; a client certificate goes into the config.
func WithTLS(config *tls.Config) DialOption {
	return func(d *dialing) {
		if config == nil {
			config = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		d.tls = config
	}
}

// WithoutRetry fails a call at once that finds the server unavailable, where up to four tries are made else.
func WithoutRetry() DialOption { return func(d *dialing) { d.retry = false } }

// WithGRPC passes on options of gRPC itself: interceptors, tracing, a dialer.
func WithGRPC(options ...grpc.DialOption) DialOption {
	return func(d *dialing) { d.more = append(d.more, options...) }
}

func dial(address string, options []DialOption) (*grpc.ClientConn, error) {
	d := dialing{retry: true}
	for _, option := range options {
		option(&d)
	}
	switch {
	case address == "":
		return nil, errors.New("kvfork: an address is needed: host:port or unix:/path")
	case strings.HasPrefix(address, "http://"), strings.HasPrefix(address, "https://"):
		return nil, fmt.Errorf("kvfork: %s is a URL; an address is host:port or unix:/path", address)
	case strings.HasPrefix(address, "/"):
		address = "unix:" + address
	}
	local := isLocal(address)
	if d.token != "" && d.tls == nil && !local && !d.tokenInClear {
		return nil, fmt.Errorf("kvfork: refusing to send a token to %s without TLS: add WithTLS, or WithTokenInClear", address)
	}
	all := []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReceiveBytes)),
		// Notices a server that vanished without a word; the server allows a ping every 10 s.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
	}
	if d.tls != nil {
		all = append(all, grpc.WithTransportCredentials(credentials.NewTLS(d.tls)))
	} else {
		all = append(all, grpc.WithTransportCredentials(insecure.NewCredentials()))
	}
	if d.token != "" {
		all = append(all, grpc.WithPerRPCCredentials(bearer(d.token)))
	}
	if d.retry {
		all = append(all, grpc.WithDefaultServiceConfig(serviceConfig))
	} else {
		all = append(all, grpc.WithDisableRetry())
	}
	if local {
		all = append(all, grpc.WithNoProxy()) // a proxy variable must not catch loopback
	}
	return grpc.NewClient(address, append(all, d.more...)...)
}

// bearer is checked against the transport by dial, which knows of loopback.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (b bearer) RequireTransportSecurity() bool { return false }

// isLocal tells whether an address never leaves the machine.
func isLocal(address string) bool {
	if strings.HasPrefix(address, "unix:") || strings.HasPrefix(address, "unix-abstract:") {
		return true
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
