package kvfork.client;

import io.grpc.CallCredentials;
import io.grpc.CallOptions;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;

/** Where a server is and how to talk to it. */
final class Connecting {
  private static final int MAX_MESSAGE_BYTES = 64 << 20; // token lists of long contexts pass gRPC's 4 MiB

  /** Only UNAVAILABLE is safe to repeat blindly, and gRPC repeats it only while no reply has begun. */
  private static final Map<String, ?> SERVICE_CONFIG =
      Map.of(
          "methodConfig",
          List.of(
              Map.of(
                  "name",
                  List.of(
                      Map.of("service", "kvfork.v1.InferenceService"),
                      Map.of("service", "kvfork.v1.SnapshotService"),
                      Map.of("service", "kvfork.v1.ServerService")),
                  "retryPolicy",
                  Map.of(
                      "maxAttempts", 4.0,
                      "initialBackoff", "0.2s",
                      "maxBackoff", "3s",
                      "backoffMultiplier", 2.5,
                      "retryableStatusCodes", List.of("UNAVAILABLE")))));

  private final String address;
  String token; // null: none
  boolean tokenInClear;
  ChannelCredentials tls; // null: plaintext
  boolean retry = true;

  Connecting(String address) {
    if (address.isEmpty() || address.startsWith("http://") || address.startsWith("https://")) {
      throw new IllegalArgumentException("an address is host:port or unix:/path, not \"" + address + "\"");
    }
    this.address = address.startsWith("/") ? "unix:" + address : address;
  }

  ManagedChannel open() {
    boolean local = isLocal(address);
    if (token != null && tls == null && !local && !tokenInClear) {
      throw new IllegalArgumentException(
          "refusing to send a token to " + address + " without TLS: add tls, or tokenInClear if the network is trusted");
    }
    var builder =
        Grpc.newChannelBuilder(address, tls == null ? InsecureChannelCredentials.create() : tls)
            .maxInboundMessageSize(MAX_MESSAGE_BYTES)
            // Notices a server that vanished without a word; the server allows a ping every 10 s.
            .keepAliveTime(30, TimeUnit.SECONDS)
            .keepAliveTimeout(20, TimeUnit.SECONDS);
    if (retry) {
      builder.enableRetry().defaultServiceConfig(SERVICE_CONFIG);
    } else {
      builder.disableRetry();
    }
    if (local) {
      builder.proxyDetector(target -> null); // a proxy's settings must not catch loopback
    }
    return builder.build();
  }

  CallOptions callOptions() {
    return token == null ? CallOptions.DEFAULT : CallOptions.DEFAULT.withCallCredentials(new Bearer(token));
  }

  /** Whether an address never leaves the machine. */
  static boolean isLocal(String address) {
    if (address.startsWith("unix:")) {
      return true;
    }
    String host = address.replaceFirst(":\\d+$", "").replaceAll("^\\[|\\]$", "");
    return host.equals("localhost") || host.equals("::1") || host.matches("127(\\.\\d{1,3}){3}");
  }

  /** Is checked against the transport by {@link #open}, which knows of loopback. */
  private static final class Bearer extends CallCredentials {
    private static final Metadata.Key<String> AUTHORIZATION =
        Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
    private final String token;

    Bearer(String token) {
      this.token = token;
    }

    @Override
    public void applyRequestMetadata(RequestInfo info, Executor executor, MetadataApplier applier) {
      Metadata headers = new Metadata();
      headers.put(AUTHORIZATION, "Bearer " + token);
      applier.apply(headers);
    }
  }
}
