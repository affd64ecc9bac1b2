package kvfork.client;

import static org.junit.jupiter.api.Assertions.assertDoesNotThrow;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.TlsChannelCredentials;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class ConnectingTest {
  @ParameterizedTest
  @ValueSource(strings = {"127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/tmp/s"})
  void loopbackAndSocketsAreLocal(String address) {
    assertTrue(Connecting.isLocal(address));
  }

  @ParameterizedTest
  @ValueSource(strings = {"10.0.0.1:1", "example.org:1", "127.0.0.1.example.org:1", "[fe80::1]:1"})
  void othersAreNot(String address) {
    assertFalse(Connecting.isLocal(address));
  }

  @ParameterizedTest
  @ValueSource(strings = {"", "http://127.0.0.1:1", "https://127.0.0.1:1"})
  void urlsAreNoAddresses(String address) {
    assertThrows(IllegalArgumentException.class, () -> Client.connect(address));
  }

  @Test
  void tokensDoNotCrossANetworkInTheClear() {
    var plain = Client.to("example.org:1").token("secret");
    assertThrows(IllegalArgumentException.class, plain::build);
    assertDoesNotThrow(() -> plain.tokenInClear().build().close());
    assertDoesNotThrow(() -> Client.to("127.0.0.1:1").token("secret").build().close());
    var encrypted = Client.to("example.org:1").token("secret").tls(TlsChannelCredentials.create());
    assertDoesNotThrow(() -> encrypted.build().close());
  }
}
