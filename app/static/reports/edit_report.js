// The editor of a report: it keeps a draft, its preview follows, a panel is inserted where the cursor is, and
// Ctrl+Enter ends.
import { inTurn } from 'http'
import { toast } from 'page'
import { createPicker } from 'panel_picker'
import { createDraft } from 'report_draft'
import { createReportPanel } from 'report_panels'

const WAIT_MS = 300 // after the last key

const form = document.querySelector('[data-report-editor]')
const preview = /** @type {Found} */ (document.querySelector('#preview'))
const { title, text } = form.elements

/** Where the line of a place ends, or the block of code that it is in. @param {string} whole @param {number} place */
const lineEnd = (whole, place) => {
  /** @param {number} from */
  const next = (from) => [whole.indexOf('\n', from), whole.length].find((at) => at >= 0) ?? 0
  const end = next(place)
  const isInCode = (whole.slice(0, end).match(/^```/gm) ?? []).length % 2 === 1
  return isInCode ? next(whole.indexOf('\n```', end) + 1 || whole.length) : end
}

/** The page that the server makes of the form. @param {string} action @returns {Promise<Document|null>} */
const asked = async (action) => {
  const body = new URLSearchParams(/** @type {any} */ (new FormData(/** @type {any} */ (form))))
  body.set('action', action)
  const answer = await fetch(form.querySelector('[value=preview]').getAttribute('formaction')?.split('#')[0] ?? '', {
    method: 'POST',
    body,
  }).catch(() => null)
  return answer?.ok || answer?.status === 422 ? new DOMParser().parseFromString(await answer.text(), 'text/html') : null
}
const report = /** @type {Found} */ (preview.querySelector('.report'))
/** The parts of the preview as the server sent them, before their panels were drawn. @type {WeakMap<Element, Node>} */
const sent = new WeakMap()
/** @param {Element} part */
const draw = (part) => {
  sent.set(part, part.cloneNode(true))
  if (part.matches('[data-report-panel]')) createReportPanel(/** @type {Found} */ (part), report)
  return part
}
;[...report.children].forEach(draw)
/** Show what a page has as preview; parts that are the same stay, with their charts. @param {Document} page */
const show = (page) => {
  const fresh = page.querySelector('#preview .report')
  if (!fresh) return
  const parts = [...fresh.children]
  parts.forEach((part, i) => {
    const known = report.children[i]
    if (known && sent.get(known)?.isEqualNode(part)) return
    document.adoptNode(part)
    if (known && report.children.length >= parts.length) known.replaceWith(part)
    else report.insertBefore(part, known ?? null)
    draw(part)
  })
  while (report.children.length > parts.length) report.lastElementChild?.remove()
}
const refresh = inTurn(async () => {
  const page = await asked('preview')
  preview.toggleAttribute('data-failed', !page)
  if (page) show(page)
})
let waiting = 0
form.addEventListener('input', ({ target }) => {
  if (target === title) showTitle()
  if (target !== text) return
  clearTimeout(waiting)
  waiting = setTimeout(refresh, WAIT_MS)
})
form.querySelector('[value=preview]').hidden = true // it comes by itself

/** Show the title that is typed in the heading and the window. */
const showTitle = () => {
  const shown = title.value.trim() || title.placeholder
  document.querySelector('h1').textContent = shown
  document.title = `Edit ${shown} · Halfstep`
}
// Where no cursor was set a panel or an image comes last.
text.setSelectionRange(text.value.length, text.value.length)

/** Insert a panel after the line of the cursor. @param {string} block */
const insert = (block) => {
  const end = lineEnd(text.value, text.selectionEnd)
  const gap = '\n'.repeat(end ? 2 - (text.value.slice(0, end).match(/\n{0,2}$/)?.[0].length ?? 0) : 0)
  text.setRangeText(`${gap}${block}\n`, end, end, 'end')
  keepDraft()
  refresh()
}
form.querySelector('[value=add]').addEventListener('click', async (event) => {
  event.preventDefault()
  const page = await asked('add')
  if (!page) return
  const fields = page.querySelector('.panel-fields')
  form.querySelector('.panel-fields').replaceWith(document.adoptNode(fields))
  if (fields.querySelector('[aria-invalid]')) return
  const added = page.querySelector('#report-text').value.slice(text.value.trimEnd().length).trim()
  insert(added)
  text.focus()
})
const keepDraft = createDraft(form, /** @type {Found} */ (document.querySelector('[data-save-state]')))
if (!text.value && title.value === title.placeholder) title.select()
createPicker(/** @type {Found} */ (document.querySelector('[data-picker]')), {
  text,
  insert: (block, label) => {
    insert(block)
    toast(`${label} added.`)
  },
})
