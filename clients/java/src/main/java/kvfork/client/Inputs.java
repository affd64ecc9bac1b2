package kvfork.client;

import com.google.protobuf.ByteString;
import java.util.List;
import kvfork.v1.ChatInput;
import kvfork.v1.ForkBranch;
import kvfork.v1.Image;
import kvfork.v1.Input;
import kvfork.v1.Landmark;
import kvfork.v1.Mark;
import kvfork.v1.Message;
import kvfork.v1.Part;
import kvfork.v1.RawInput;
import kvfork.v1.Role;
import kvfork.v1.Sampling;
import kvfork.v1.Stopping;

/** What to say, as the contract's messages. Made for static import. */
public final class Inputs {
  private Inputs() {}

  /** Raw text: no template. Where it opens a context it gets the tokenizer's own BOS. */
  public static Input text(String text) {
    return Input.newBuilder()
        .setRaw(RawInput.newBuilder().addParts(textPart(text)).setAddSpecialTokens(true))
        .build();
  }

  /** Parts as they are: text, token runs and images in reading order. */
  public static Input raw(Part... parts) {
    return Input.newBuilder().setRaw(RawInput.newBuilder().addAllParts(List.of(parts))).build();
  }

  /** Turns for the model's own template. With a parent these are only the turns to append. */
  public static Input chat(Message... turns) {
    return Input.newBuilder().setChat(ChatInput.newBuilder().addAllMessages(List.of(turns))).build();
  }

  /** A turn of instructions. */
  public static Message system(String text) {
    return turn(Role.ROLE_SYSTEM, textPart(text));
  }

  /** A turn of the user. */
  public static Message user(String text) {
    return turn(Role.ROLE_USER, textPart(text));
  }

  /** A turn of the model. */
  public static Message assistant(String text) {
    return turn(Role.ROLE_ASSISTANT, textPart(text));
  }

  /** Any turn. */
  public static Message turn(Role role, Part... parts) {
    return Message.newBuilder().setRole(role).addAllParts(List.of(parts)).build();
  }

  /** A piece of text. */
  public static Part textPart(String text) {
    return Part.newBuilder().setText(text).build();
  }

  /** An encoded PNG, JPEG or WebP file. */
  public static Part image(byte[] file) {
    return Part.newBuilder().setImage(Image.newBuilder().setData(ByteString.copyFrom(file))).build();
  }

  /** Always the likeliest token. */
  public static Sampling greedy() {
    return Sampling.newBuilder().setTemperature(0).build();
  }

  /** Ends a generation after so many new tokens. */
  public static Stopping maxTokens(int count) {
    return Stopping.newBuilder().setMaxTokens(count).build();
  }

  /** The end of the prompt, before the first new token. */
  public static Mark promptEnd() {
    return Mark.newBuilder().setLandmark(Landmark.LANDMARK_PROMPT_END).build();
  }

  /** A place in the context, the parent included. */
  public static Mark afterTokens(int count) {
    return Mark.newBuilder().setTokenCount(count).build();
  }

  /** The end of a turn of the chat input. */
  public static Mark afterMessages(int count) {
    return Mark.newBuilder().setMessageCount(count).build();
  }

  /** A branch of a fork that goes on with an input. */
  public static ForkBranch append(Input input) {
    return ForkBranch.newBuilder().setAppend(input).build();
  }

  /** The input without BOS if it goes on from a parent: in the middle of a context that is never right. */
  static Input continued(Input input, String parent) {
    if (parent.isEmpty() || !input.hasRaw()) {
      return input;
    }
    return input.toBuilder().setRaw(input.getRaw().toBuilder().setAddSpecialTokens(false)).build();
  }
}
