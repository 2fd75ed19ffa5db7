"""A conversation's history."""

import json

from treeline.chat.conversation import Conversation


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_each_question_is_sent_with_all_before_it():
    talk = Conversation("Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert talk.ask("a?") == [system, user("a?")]
    talk.answered("a.")
    assert talk.ask("b?") == [system, user("a?"), assistant("a."), user("b?")]


def test_a_question_without_an_answer_is_not_remembered_but_can_be_asked_again():
    talk = Conversation()
    talk.ask("a?")
    talk.answered("")
    assert talk.ask("b?") == [user("b?")]
    assert talk.take_back() == "b?"


def test_taking_back_removes_the_last_turn_once():
    talk = Conversation()
    talk.ask("a?")
    talk.answered("a.")
    talk.ask("a?")
    talk.answered("")  # the same question again, but it failed
    assert talk.take_back() == "a?"
    assert talk.ask("c?") == [user("a?"), assistant("a."), user("c?")]
    talk.answered("c.")
    assert talk.take_back() == talk.take_back() == "c?"
    assert talk.turns == [("a?", "a.")]


def test_taking_back_does_nothing_in_an_empty_conversation():
    talk = Conversation("s")
    assert talk.take_back() == ""
    talk.ask("a?")
    talk.answered("a.")
    talk.clear()
    assert talk.take_back() == ""
    assert talk.ask("b?") == [{"role": "system", "content": "s"}, user("b?")]


def test_a_conversation_is_saved_as_json_and_as_markdown():
    talk = Conversation("s")
    talk.ask("é?")
    talk.answered("**é**")
    assert json.loads(talk.as_json()) == [{"role": "system", "content": "s"}, user("é?"), assistant("**é**")]
    assert talk.as_markdown() == "## system\n\ns\n\n## user\n\né?\n\n## assistant\n\n**é**\n"
