package kvfork.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
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

/** A call that failed: its reason and the details that the server tells. */
public final class KvforkException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  /** One wrong field of a request: its path and what is wrong. */
  public record FieldViolation(String path, String text) {}

  private final Status.Code code;
  private final String reasonName;
  private final String text;
  private final transient Map<String, String> metadata;
  private final transient List<FieldViolation> fields;
  private final Duration retryAfter;
  private final String resource;
  private final String incident;

  private KvforkException(com.google.rpc.Status status, Throwable cause) {
    super(null, cause);
    String reason = "";
    Map<String, String> facts = Map.of();
    List<FieldViolation> wrong = List.of();
    Duration delay = null;
    String looked = "";
    String logged = "";
    for (Any detail : status.getDetailsList()) {
      try {
        if (detail.is(ErrorInfo.class)) {
          ErrorInfo info = detail.unpack(ErrorInfo.class);
          reason = info.getReason();
          facts = Map.copyOf(info.getMetadataMap());
        } else if (detail.is(BadRequest.class)) {
          wrong =
              detail.unpack(BadRequest.class).getFieldViolationsList().stream()
                  .map(one -> new FieldViolation(one.getField(), one.getDescription()))
                  .toList();
        } else if (detail.is(RetryInfo.class)) {
          var told = detail.unpack(RetryInfo.class).getRetryDelay();
          delay = Duration.ofSeconds(told.getSeconds(), told.getNanos());
        } else if (detail.is(ResourceInfo.class)) {
          looked = detail.unpack(ResourceInfo.class).getResourceName();
        } else if (detail.is(RequestInfo.class)) {
          logged = detail.unpack(RequestInfo.class).getRequestId();
        }
      } catch (InvalidProtocolBufferException undecodable) {
        continue; // as good as not told
      }
    }
    this.code = Status.fromCodeValue(status.getCode()).getCode();
    this.reasonName = reason;
    this.text = status.getMessage();
    this.metadata = facts;
    this.fields = wrong;
    this.retryAfter = delay;
    this.resource = looked;
    this.incident = logged;
  }

  /** The typed form of anything that a gRPC call threw. */
  public static KvforkException of(Throwable thrown) {
    if (thrown instanceof KvforkException known) {
      return known;
    }
    com.google.rpc.Status told = StatusProto.fromThrowable(thrown);
    if (told == null) {
      return of(Status.fromThrowable(thrown).getCode(), "", String.valueOf(thrown.getMessage()), thrown);
    }
    return new KvforkException(told, thrown);
  }

  static KvforkException of(Status.Code code, String reason, String text, Throwable cause) {
    var told = com.google.rpc.Status.newBuilder().setCode(code.value()).setMessage(text);
    if (!reason.isEmpty()) {
      told.addDetails(Any.pack(ErrorInfo.newBuilder().setReason(reason).build()));
    }
    return new KvforkException(told.build(), cause);
  }

  @Override
  public String getMessage() {
    return (reasonName.isEmpty() ? code.name() : reasonName) + ": " + text;
  }

  /** The gRPC status code. */
  public Status.Code code() {
    return code;
  }

  /** What went wrong; {@link Reason#OTHER} if gRPC itself ended the call, or the reason is newer than this client. */
  public Reason reason() {
    return Reason.of(reasonName);
  }

  /** The reason as the server names it; empty if gRPC itself ended the call. */
  public String reasonName() {
    return reasonName;
  }

  /** For people. */
  public String text() {
    return text;
  }

  /** The facts of the text. */
  public Map<String, String> metadata() {
    return metadata == null ? Map.of() : metadata;
  }

  /** The wrong fields of the request. */
  public List<FieldViolation> fields() {
    return fields == null ? List.of() : fields;
  }

  /** When a retry makes sense, if the server told. */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(retryAfter);
  }

  /** The name of what was looked for. */
  public String resource() {
    return resource;
  }

  /** Leads to the server's log. */
  public String incident() {
    return incident;
  }

  /** The snapshot that was named was never there, or is there no more, for whatever reason. */
  public boolean snapshotIsGone() {
    return reason().isGone();
  }
}
