package kvfork.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.rpc.BadRequest;
import com.google.rpc.Code;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RequestInfo;
import com.google.rpc.ResourceInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.junit.jupiter.api.Test;

class KvforkExceptionTest {
  private static KvforkException decoded(Code code, Any... details) {
    var status = com.google.rpc.Status.newBuilder().setCode(code.getNumber()).setMessage("text");
    return KvforkException.of(StatusProto.toStatusRuntimeException(status.addAllDetails(List.of(details)).build()));
  }

  @Test
  void everyDetailIsTold() {
    var wrong = BadRequest.FieldViolation.newBuilder().setField("a.b").setDescription("must be c");
    var error =
        decoded(
            Code.NOT_FOUND,
            Any.pack(ErrorInfo.newBuilder().setReason("SNAPSHOT_EXPIRED").putMetadata("expireTime", "now").build()),
            Any.pack(BadRequest.newBuilder().addFieldViolations(wrong).build()),
            Any.pack(
                RetryInfo.newBuilder()
                    .setRetryDelay(com.google.protobuf.Duration.newBuilder().setSeconds(1).setNanos(500_000_000))
                    .build()),
            Any.pack(ResourceInfo.newBuilder().setResourceName("snapshots/a").build()),
            Any.pack(RequestInfo.newBuilder().setRequestId("incident").build()));
    assertEquals(Status.Code.NOT_FOUND, error.code());
    assertEquals(Reason.SNAPSHOT_EXPIRED, error.reason());
    assertEquals(Map.of("expireTime", "now"), error.metadata());
    assertEquals(List.of(new KvforkException.FieldViolation("a.b", "must be c")), error.fields());
    assertEquals(Optional.of(Duration.ofMillis(1500)), error.retryAfter());
    assertEquals("snapshots/a", error.resource());
    assertEquals("incident", error.incident());
    assertTrue(error.snapshotIsGone());
    assertEquals("SNAPSHOT_EXPIRED: text", error.getMessage());
  }

  @Test
  void aNewerReasonKeepsItsName() {
    var error = decoded(Code.INTERNAL, Any.pack(ErrorInfo.newBuilder().setReason("YET_UNKNOWN").build()));
    assertEquals(Reason.OTHER, error.reason());
    assertEquals("YET_UNKNOWN", error.reasonName());
    assertFalse(error.snapshotIsGone());
  }

  @Test
  void undecodableDetailsAreAsGoodAsNone() {
    var broken = Any.newBuilder().setTypeUrl("type.googleapis.com/google.rpc.ErrorInfo");
    var error = decoded(Code.ABORTED, broken.setValue(ByteString.copyFrom(new byte[] {10, 99})).build());
    assertEquals(Status.Code.ABORTED, error.code());
    assertEquals("", error.reasonName());
  }

  @Test
  void whatGrpcItselfSaysHasNoReason() {
    var error = KvforkException.of(Status.UNAVAILABLE.withDescription("no connection").asRuntimeException());
    assertEquals(Status.Code.UNAVAILABLE, error.code());
    assertEquals(Reason.OTHER, error.reason());
    assertEquals("no connection", error.text());
  }
}
