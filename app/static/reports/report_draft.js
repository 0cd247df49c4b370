// The draft of a report: saved after a pause in typing, kept in the browser until the server has it.
import { inTurn } from 'http'
import { toast } from 'page'
import { root } from 'root'

const WAIT_MS = 1500 // after the last key

/**
 * Save the report whenever its form changes. Returns a function that saves now.
 * @param {Found} form
 * @param {Found} state what says how it went
 */
export const createDraft = (form, state) => {
  const { title, text, version } = form.elements
  const key = `halfstep-report-${form.dataset.reportEditor}`
  const content = () => ({ title: title.value, text: text.value, version: Number(version.value) })
  /** The server stores no whitespace at the ends. */
  const stored = (/** @type {{title: string, text: string}} */ of) =>
    JSON.stringify([of.title.trim(), of.text.trimEnd()])
  const asSaved = () => stored(content())
  /** Whether the server has shown the form again, because it did not save it. */
  const isReturned = state.hasAttribute('data-failed')
  let saved = isReturned ? '' : asSaved()
  let timer = 0
  let isRefused = !!document.querySelector('[data-others]') // text of another user is replaced by Save only
  /** @param {string} words @param {boolean} [isFailed] */
  const say = (words, isFailed = false) => {
    if (state.textContent !== words) state.textContent = words
    state.toggleAttribute('data-failed', isFailed)
  }
  const keep = () => {
    try {
      // An earlier version than theirs: it is offered, and does not replace theirs.
      const seen = isRefused ? Math.max(Number(version.value) - 1, 1) : Number(version.value)
      localStorage.setItem(key, JSON.stringify({ ...content(), version: seen }))
    } catch {
      /* full or forbidden: the server has it soon */
    }
  }
  /** @param {boolean} [isLast] the page is left */
  const send = async (isLast = false) => {
    const [sent, body] = [asSaved(), JSON.stringify(content())]
    const answer = await fetch(`${root}/api/v1/reports/${form.dataset.reportEditor}`, {
      method: 'PUT',
      body,
      keepalive: isLast,
      headers: { 'X-CSRF-Token': form.elements.csrf_token.value, 'Content-Type': 'application/json' },
    }).catch(() => null)
    if (!answer || answer.status >= 500) return 'The server does not answer.'
    if (answer.ok) {
      version.value = (await answer.json()).version
      saved = sent
      if (asSaved() === sent) localStorage.removeItem(key)
      return ''
    }
    const { code, detail, errors } = await answer.json().catch(() => ({}))
    isRefused = code === 'changed'
    if (isRefused) return 'another user has changed this report. Save shows both versions.'
    return Object.values(errors ?? {})[0] ?? detail ?? `status ${answer.status}`
  }
  const save = inTurn(async () => {
    clearTimeout(timer)
    if (isRefused) return
    if (asSaved() === saved) {
      localStorage.removeItem(key)
      return say('Saved')
    }
    say('Saving…')
    const problem = await send()
    if (problem) {
      say(`Not saved: ${problem}`, true)
      if (!isRefused) timer = setTimeout(save, 4 * WAIT_MS)
    } else say(asSaved() === saved ? 'Saved' : 'Saving…')
  })
  const change = () => {
    keep()
    if (isRefused) return
    say('Saving…')
    clearTimeout(timer)
    timer = setTimeout(save, WAIT_MS)
  }
  form.addEventListener('input', ({ target }) => {
    if (target === title || target === text) change()
  })
  addEventListener('pagehide', () => {
    if (!isRefused && asSaved() !== saved) send(true)
  })

  if (isReturned) {
    keep()
    return { change, save }
  }
  say('Saved')
  const kept = JSON.parse(localStorage.getItem(key) ?? 'null')
  if (kept && stored(kept) !== saved) {
    const restore = () => {
      title.value = kept.title
      text.value = kept.text
      version.value = kept.version
      text.dispatchEvent(new Event('input', { bubbles: true }))
    }
    if (kept.version === Number(version.value)) restore()
    else toast('Text of yours was not saved.', { label: 'Restore', act: restore })
  } else localStorage.removeItem(key)
  return { change, save }
}
