// The draft of a report: kept in the browser until it is saved or discarded. Readers see what was saved.
import { toast } from 'page'

/**
 * Keep the form of a report in the browser whenever it changes. Returns a function that keeps it now.
 * @param {Found} form
 * @param {Found} state what says whether there is a draft
 */
export const createDraft = (form, state) => {
  const { title, text, version } = form.elements
  const cancel = form.querySelector('[formaction$="/cancellation"]')
  const key = `halfstep-report-${form.dataset.reportEditor}`
  const content = () => ({ title: title.value, text: text.value, version: Number(version.value) })
  /** The server stores no whitespace at the ends. */
  const stored = (/** @type {{title: string, text: string}} */ of) =>
    JSON.stringify([of.title.trim(), of.text.trimEnd()])
  /** The server has shown the form again, because it did not save it. */
  const isReturned = state.hasAttribute('data-failed')
  const hasOthers = !!document.querySelector('[data-others]')
  const saved = isReturned ? '' : stored({ title: title.defaultValue, text: text.defaultValue })

  /** Returns what to say of the draft. @param {boolean} isSent */
  const keep = (isSent) => {
    const isDraft = stored(content()) !== saved
    if (isDraft) cancel.dataset.confirm = 'Discard the draft? This cannot be undone.'
    else delete cancel.dataset.confirm
    try {
      // An earlier version than theirs: it is offered, and does not replace theirs.
      const seen = Number(version.value) - Number(hasOthers && !isSent)
      if (isDraft) localStorage.setItem(key, JSON.stringify({ ...content(), version: seen, isSent }))
      else localStorage.removeItem(key)
      return isDraft ? 'Draft, kept in this browser' : 'Saved'
    } catch {
      return isDraft ? 'Draft, not kept: save it before you leave' : 'Saved'
    }
  }
  const change = () => {
    const words = keep(false)
    if (state.textContent !== words) state.textContent = words
    state.removeAttribute('data-failed')
  }
  form.addEventListener('input', ({ target }) => {
    if (target === title || target === text) change()
  })
  form.addEventListener('submit', ({ submitter }) => {
    if (submitter === cancel) localStorage.removeItem(key)
    else keep(true)
  })

  if (isReturned) {
    keep(false)
    return change
  }
  const kept = JSON.parse(localStorage.getItem(key) ?? 'null')
  const isOlder = kept && kept.version < Number(version.value)
  // One that was sent and is older was saved.
  if (!kept || stored(kept) === saved || (isOlder && kept.isSent)) {
    change()
    return change
  }
  state.textContent = 'Saved'
  const restore = () => {
    title.value = kept.title
    text.value = kept.text
    version.value = kept.version
    for (const field of [title, text]) field.dispatchEvent(new Event('input', { bubbles: true }))
  }
  if (!isOlder) restore()
  else toast('A draft of yours was not saved.', { label: 'Restore', act: restore })
  return change
}
