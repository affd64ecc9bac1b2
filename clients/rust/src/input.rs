//! What to say, as the contract's messages.

use crate::v1::{
    ChatInput, ForkBranch, Image, Input, Landmark, Mark, Message, Part, RawInput, Role, Sampling, Stopping, TokenRun,
    image, input, mark, part,
};

/// Raw text: no template. Where it opens a context it gets the tokenizer's own BOS.
pub fn text(text: impl Into<String>) -> Input {
    let parts = vec![text_part(text)];
    Input {
        form: Some(input::Form::Raw(RawInput { parts, add_special_tokens: true, ..Default::default() })),
        ..Default::default()
    }
}

/// Parts as they are: text, token runs and images in reading order.
pub fn raw(parts: impl IntoIterator<Item = Part>) -> Input {
    let parts = parts.into_iter().collect();
    Input { form: Some(input::Form::Raw(RawInput { parts, ..Default::default() })), ..Default::default() }
}

/// Turns for the model's own template. With a parent these are only the turns to append.
pub fn chat(turns: impl IntoIterator<Item = Message>) -> Input {
    let messages = turns.into_iter().collect();
    Input { form: Some(input::Form::Chat(ChatInput { messages, ..Default::default() })), ..Default::default() }
}

/// A turn of instructions.
pub fn system(text: impl Into<String>) -> Message {
    turn(Role::System, [text_part(text)])
}

/// A turn of the user.
pub fn user(text: impl Into<String>) -> Message {
    turn(Role::User, [text_part(text)])
}

/// A turn of the model.
pub fn assistant(text: impl Into<String>) -> Message {
    turn(Role::Assistant, [text_part(text)])
}

/// Any turn.
pub fn turn(role: Role, parts: impl IntoIterator<Item = Part>) -> Message {
    Message { role: role.into(), parts: parts.into_iter().collect(), ..Default::default() }
}

/// A piece of text.
pub fn text_part(text: impl Into<String>) -> Part {
    Part { kind: Some(part::Kind::Text(text.into())), ..Default::default() }
}

/// Token ids taken verbatim.
pub fn tokens(ids: impl IntoIterator<Item = u32>) -> Part {
    Part {
        kind: Some(part::Kind::Tokens(TokenRun { ids: ids.into_iter().collect(), ..Default::default() })),
        ..Default::default()
    }
}

/// An encoded PNG, JPEG or WebP file.
pub fn image(file: impl Into<Vec<u8>>) -> Part {
    let source = Some(image::Source::Data(file.into()));
    Part { kind: Some(part::Kind::Image(Image { source, ..Default::default() })), ..Default::default() }
}

/// Always the likeliest token.
pub fn greedy() -> Sampling {
    Sampling { temperature: Some(0.0), ..Default::default() }
}

/// Ends a generation after this many new tokens.
pub fn max_tokens(count: u32) -> Stopping {
    Stopping { max_tokens: Some(count), ..Default::default() }
}

/// The end of the prompt, before the first new token.
pub fn prompt_end() -> Mark {
    Mark { at: Some(mark::At::Landmark(Landmark::PromptEnd.into())), ..Default::default() }
}

/// A place in the context, the parent included.
pub fn after_tokens(count: u32) -> Mark {
    Mark { at: Some(mark::At::TokenCount(count)), ..Default::default() }
}

/// The end of a turn of the chat input.
pub fn after_messages(count: u32) -> Mark {
    Mark { at: Some(mark::At::MessageCount(count)), ..Default::default() }
}

/// A branch of a fork that goes on with an input.
pub fn append(input: Input) -> ForkBranch {
    ForkBranch { append: Some(input), ..Default::default() }
}

/// Takes the BOS from an input that goes on from a parent: in the middle of a context it is never right.
pub(crate) fn continues(input: &mut Option<Input>, parent: &str) {
    if let (Some(Input { form: Some(input::Form::Raw(raw)), .. }), false) = (input, parent.is_empty()) {
        raw.add_special_tokens = false;
    }
}
