package kvfork

import (
	"crypto/rand"
	"fmt"

	pb "kvfork.example/go/kvforkv1"

	"google.golang.org/protobuf/proto"
)

// Text is raw text: no template. Where it opens a context it gets the tokenizer's own BOS.
func Text(text string) *pb.Input {
	return &pb.Input{Form: &pb.Input_Raw{Raw: &pb.RawInput{Parts: []*pb.Part{TextPart(text)}, AddSpecialTokens: true}}}
}

// Raw is parts as they are: text, token runs and images in reading order.
func Raw(parts ...*pb.Part) *pb.Input {
	return &pb.Input{Form: &pb.Input_Raw{Raw: &pb.RawInput{Parts: parts}}}
}

// Chat is turns for the model's own template. With a parent these are only the turns to append.
func Chat(turns ...*pb.Message) *pb.Input {
	return &pb.Input{Form: &pb.Input_Chat{Chat: &pb.ChatInput{Messages: turns}}}
}

// System is a turn of instructions.
func System(text string) *pb.Message { return Turn(pb.Role_ROLE_SYSTEM, TextPart(text)) }

// User is a turn of the user.
func User(text string) *pb.Message { return Turn(pb.Role_ROLE_USER, TextPart(text)) }

// Assistant is a turn of the model.
func Assistant(text string) *pb.Message { return Turn(pb.Role_ROLE_ASSISTANT, TextPart(text)) }

// Turn is any turn.
func Turn(role pb.Role, parts ...*pb.Part) *pb.Message { return &pb.Message{Role: role, Parts: parts} }

// TextPart is a piece of text.
func TextPart(text string) *pb.Part { return &pb.Part{Kind: &pb.Part_Text{Text: text}} }

// ImagePart is an encoded PNG, JPEG or WebP file.
func ImagePart(file []byte) *pb.Part {
	return &pb.Part{Kind: &pb.Part_Image{Image: &pb.Image{Source: &pb.Image_Data{Data: file}}}}
}

// Greedy always picks the likeliest token.
func Greedy() *pb.Sampling { return &pb.Sampling{Temperature: proto.Float32(0)} }

// MaxTokens ends a generation after this many new tokens.
func MaxTokens(count int) *pb.Stopping { return &pb.Stopping{MaxTokens: proto.Uint32(uint32(count))} }

// PromptEnd marks the end of the prompt, before the first new token.
func PromptEnd() *pb.Mark {
	return &pb.Mark{At: &pb.Mark_Landmark{Landmark: pb.Landmark_LANDMARK_PROMPT_END}}
}

// AfterTokens marks a place in the context, the parent included.
func AfterTokens(count int) *pb.Mark {
	return &pb.Mark{At: &pb.Mark_TokenCount{TokenCount: uint32(count)}}
}

// AfterMessages marks the end of a turn of the chat input.
func AfterMessages(count int) *pb.Mark {
	return &pb.Mark{At: &pb.Mark_MessageCount{MessageCount: uint32(count)}}
}

// Append is a branch of a fork that goes on with an input.
func Append(input *pb.Input) *pb.ForkBranch { return &pb.ForkBranch{Append: input} }

// continued is an input without BOS if it goes on from a parent: in the middle of a context that is never right. The
// input is the caller's own copy.
func continued(input *pb.Input, parent string) *pb.Input {
	if raw := input.GetRaw(); raw != nil && parent != "" {
		raw.AddSpecialTokens = false
	}
	return input
}

// requestID makes a repeated call return what the first one made.
func requestID(given string) string {
	if given != "" {
		return given
	}
	var id [16]byte
	rand.Read(id[:]) // never fails
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}
