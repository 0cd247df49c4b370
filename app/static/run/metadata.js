// Name, tags and note of a run, edited in place; what others change meanwhile is shown.
import { inTurn, insisted } from 'http'
import { toast } from 'page'
import { still } from 'dom_updates'

/** @param {string} text */
const asTags = (text) =>
  text
    .split(',')
    .map((tag) => tag.trim())
    .filter(Boolean)

/**
 * @param {HTMLElement} article
 * @param {string} api the run's address
 * @returns {(mark: number) => void} to call with the mark of the current labels
 */
export const createLabels = (article, api) => {
  const view = article.querySelector('[data-fragment=labels]')
  const form = article.querySelector('[data-label-form]')
  const button = article.querySelector('[data-edit-labels]')
  const problem = form.querySelector('[data-label-problem]')
  let mark = Number(view.dataset.mark)
  /** Values that the editing user has seen. @type {{name: string, tags: string[], note: string}|null} */
  let seen = null

  const refetch = inTurn(async () => {
    const page = new DOMParser().parseFromString(await (await insisted(location.pathname)).text(), 'text/html')
    const fresh = page.querySelector('[data-fragment=labels]')
    if (!fresh) return
    still(() => {
      mark = Number(fresh.dataset.mark)
      view.replaceChildren(...document.adoptNode(fresh).childNodes)
      article.querySelector('[data-name]').replaceWith(document.adoptNode(page.querySelector('[data-name]')))
      document.title = page.title
    })
  })

  const load = async () => {
    const { name, tags, note } = await (await insisted(api)).json()
    return { name, tags, note }
  }
  const open = async () => {
    if (seen) return form.elements.name.focus()
    seen = await load()
    Object.assign(form.elements.name, { value: seen.name })
    form.elements.tags.value = seen.tags.join(', ')
    form.elements.note.value = seen.note
    show({}, '')
    form.hidden = false
    view.hidden = true
    form.elements.name.focus()
  }
  const close = () => {
    seen = null
    form.hidden = true
    view.hidden = false
    button.focus()
  }

  /** @param {Record<string, string>} errors by field @param {string} text */
  const show = (errors, text) => {
    for (const name of ['name', 'tags', 'note']) {
      const error = form.querySelector(`#label-${name}-error`)
      error.textContent = errors[name] ?? ''
      error.hidden = !errors[name]
      form.elements[name].toggleAttribute('aria-invalid', Boolean(errors[name]))
    }
    problem.textContent = text
    problem.hidden = !text
  }

  const save = async () => {
    const { name, tags, note } = form.elements
    const wanted = { name: name.value, tags: asTags(tags.value), note: note.value }
    const answer = await fetch(api, {
      method: 'PATCH',
      headers: {
        'X-CSRF-Token': document.querySelector('meta[name=csrf-token]').content,
        'Content-Type': 'application/json',
      },
      body: JSON.stringify({ ...changed(wanted, seen), seen }),
    })
    if (answer.ok) {
      close()
      await refetch()
      return toast('Saved.')
    }
    const { code, detail, errors } = await answer.json()
    if (code !== 'changed') return show(errors ?? {}, errors ? '' : detail)
    seen = await load()
    await refetch()
    view.hidden = false
    show(
      {},
      'This was changed in the meantime, by another user or in another tab. Save again to replace that text with yours.',
    )
  }

  button.addEventListener('click', () => {
    open().catch(() => toast('The server does not answer.'))
  })
  form.querySelector('[data-label-cancel]').addEventListener('click', close)
  form.addEventListener('submit', async (event) => {
    event.preventDefault()
    form.inert = true
    await save().catch(() => show({}, 'The server does not answer. Nothing was saved.'))
    form.inert = false
  })
  form.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) form.requestSubmit()
  })
  return (newest) => {
    if (newest !== mark) refetch()
  }
}

/** Return the fields that the user has changed; unchanged ones cannot conflict. */
const changed = (wanted, seen) =>
  Object.fromEntries(Object.entries(wanted).filter(([name, value]) => String(value) !== String(seen[name])))
